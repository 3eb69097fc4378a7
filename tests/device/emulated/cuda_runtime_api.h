// SPDX-License-Identifier: Apache-2.0
// What gradwire and its tests call of CUDA's run-time library, for one emulated GPU whose memory is the host's. All
// that is enqueued is done at once, or kept while its stream is captured.
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "emulated_gpu.h"

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorStreamCaptureUnsupported };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline constexpr unsigned cudaStreamNonBlocking = 1;

using EmulatedGraph = std::vector<std::function<void()>>;
struct EmulatedStream {
  std::unique_ptr<EmulatedGraph> captured;
};
using cudaStream_t = EmulatedStream*;
using cudaGraph_t = EmulatedGraph*;
using cudaGraphExec_t = EmulatedGraph*;

struct cudaDeviceProp {
  char name[16] = "emulated";
  int major = 0, minor = 0, multiProcessorCount = 1;
  size_t totalGlobalMem = 0;
};

inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int) { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* index) { return *index = 0, cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t code) {
  return code == cudaErrorStreamCaptureUnsupported ? "not allowed while a stream is captured" : "no error";
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

// Few thread blocks, so that each of them takes several items, one after another in the same shared memory.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  return *value = which == cudaDevAttrMultiProcessorCount ? 1 : 227 << 10, cudaSuccess;
}
struct cudaFuncAttributes {
  size_t sharedSizeBytes = 0;
};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  return *blocks = 3, cudaSuccess;
}

// New memory holds anything but zeros.
template <class T>
cudaError_t cudaMalloc(T** to, size_t bytes) {
  *to = static_cast<T*>(std::memset(::operator new (bytes, std::align_val_t{256}), 0xa5, bytes));
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* data) { return ::operator delete (data, std::align_val_t{256}), cudaSuccess; }
template <class T>
cudaError_t cudaMallocHost(T** to, size_t bytes) {
  return cudaMalloc(to, bytes);
}
inline cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }

// --- streams -------------------------------------------------------------------------------------------------------

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = new EmulatedStream, cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return stream && stream->captured ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return gradwire::emulated::perform(stream, [=] { std::memset(to, value, bytes); }), cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return gradwire::emulated::perform(stream, [=] { std::memcpy(to, from, bytes); }), cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                     size_t rows, cudaMemcpyKind, cudaStream_t stream) {
  gradwire::emulated::perform(stream, [=] {
    for (size_t row = 0; row < rows; ++row)
      std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  });
  return cudaSuccess;
}

// --- graphs --------------------------------------------------------------------------------------------------------

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (!stream || stream->captured) return cudaErrorStreamCaptureUnsupported;
  return stream->captured = std::make_unique<EmulatedGraph>(), cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return *graph = stream->captured.release(), *graph ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* runs, cudaGraph_t graph, unsigned long long) {
  return *runs = new EmulatedGraph(*graph), cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  for (const std::function<void()>& work : *graph) gradwire::emulated::perform(stream, work);
  return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return delete graph, cudaSuccess; }
