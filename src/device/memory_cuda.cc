// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "device/cuda_job.h"
#include "device/memory.h"
#include "gradwire/error.h"

namespace gradwire {

void cuda_throw(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // so that the next call does not see it again
  throw Error(ErrorKind::device, fmt::format("CUDA: {}: {}", what, cudaGetErrorString(code)), what);
}

namespace {

struct CudaMemory final : Memory {
  CudaMemory(int i, cudaStream_t s) : index(i), stream(s) {}
  const int index;
  const cudaStream_t stream;

  void use() const { cuda_throw(cudaSetDevice(index), "cudaSetDevice"); }
  // Without a stream of one's own there may be work for this memory on any.
  void settle() const { cuda_throw(stream ? cudaStreamSynchronize(stream) : cudaDeviceSynchronize(), "synchronize"); }
  bool on_host() const override { return false; }
  void* allocate(size_t bytes) override {
    use();
    void* data = nullptr;
    cuda_throw(cudaMalloc(&data, bytes ? bytes : 1), "cudaMalloc");
    return data;
  }
  void release(void* data) override { cudaFree(data); }
  void zero(void* data, size_t bytes) override {
    use();
    cuda_throw(cudaMemsetAsync(data, 0, bytes, stream), "cudaMemsetAsync");
    settle();
  }
  void to_host(void* host, const void* data, size_t bytes) override {
    use();
    if (!stream) settle();
    start_to_host(host, data, bytes);
    settle();
  }
  void from_host(void* data, const void* host, size_t bytes) override {
    start_from_host(data, host, bytes);
    settle();
  }
  void* allocate_host(size_t bytes) override {
    use();
    void* data = nullptr;
    cuda_throw(cudaMallocHost(&data, bytes ? bytes : 1), "cudaMallocHost");
    return data;
  }
  void release_host(void* data) override { cudaFreeHost(data); }
  void start_to_host(void* host, const void* data, size_t bytes) override {
    use();
    if (bytes) cuda_throw(cudaMemcpyAsync(host, data, bytes, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  }
  void start_from_host(void* data, const void* host, size_t bytes) override {
    use();
    if (bytes) cuda_throw(cudaMemcpyAsync(data, host, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  }
  void copy(void* to, const void* from, size_t bytes) override {
    use();
    if (bytes) cuda_throw(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
  }
  void wait() override {
    use();
    cuda_throw(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
};

}  // namespace

std::shared_ptr<Memory> cuda_memory(int index, void* stream) {
  return std::make_shared<CudaMemory>(index, static_cast<cudaStream_t>(stream));
}

}  // namespace gradwire
