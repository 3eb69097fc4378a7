// SPDX-License-Identifier: Apache-2.0
// What the runner calls of CUDA's run-time library, for one emulated GPU whose memory is the host's. All that is
// enqueued is done at once.
#pragma once

#include <cstddef>
#include <cstring>
#include <new>

using cudaStream_t = struct EmulatedStream*;
enum cudaError_t { cudaSuccess };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
struct cudaDeviceProp {
  char name[16] = "emulated";
  int major = 0, minor = 0, multiProcessorCount = 1;
  size_t totalGlobalMem = 0;
};

inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int) { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

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

inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  return std::memset(to, value, bytes), cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                     size_t rows, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  return cudaSuccess;
}
