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
  int index;
  explicit CudaMemory(int i) : index(i) {}
  void use() const { cuda_throw(cudaSetDevice(index), "cudaSetDevice"); }
  void* allocate(size_t bytes) override {
    use();
    void* data = nullptr;
    cuda_throw(cudaMalloc(&data, bytes ? bytes : 1), "cudaMalloc");
    return data;
  }
  void release(void* data) override { cudaFree(data); }
  void zero(void* data, size_t bytes) override {
    use();
    cuda_throw(cudaMemset(data, 0, bytes), "cudaMemset");
    cuda_throw(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void to_host(void* host, const void* data, size_t bytes) override {
    use();
    cuda_throw(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    cuda_throw(cudaMemcpy(host, data, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }
  void from_host(void* data, const void* host, size_t bytes) override {
    use();
    cuda_throw(cudaMemcpy(data, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    cuda_throw(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
};

}  // namespace

std::shared_ptr<Memory> cuda_memory(int index) { return std::make_shared<CudaMemory>(index); }

}  // namespace gradwire
