// SPDX-License-Identifier: Apache-2.0
// The benchmark backend in GPU memory, with one stream and CUDA events around the work. It has no kernels, so a C++
// compiler is enough.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <atomic>
#include <vector>

#include "bench/backend.h"
#include "gradwire/error.h"

namespace gradwire::app {
namespace {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw Error(ErrorKind::device, fmt::format("{}: {}", call, cudaGetErrorString(status)), call);
}
#define GW_CUDA(call) check(call, #call)

class CudaBenchBackend final : public BenchBackend {
 public:
  CudaBenchBackend() {
    GW_CUDA(cudaSetDevice(0));
    GW_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    GW_CUDA(cudaEventCreate(&start_));
    GW_CUDA(cudaEventCreate(&end_));
    int cache = 0;
    GW_CUDA(cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, 0));
    cache_ = static_cast<size_t>(cache);
    device_.kind = Device::Kind::cuda;
    device_.stream = stream_;
  }
  ~CudaBenchBackend() override {
    cudaStreamSynchronize(stream_);
    for (void* block : blocks_) cudaFree(block);
    cudaEventDestroy(start_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }
  const Device& device() const override { return device_; }
  void* allocate(size_t bytes) override {
    void* block = nullptr;
    GW_CUDA(cudaMalloc(&block, bytes > 0 ? bytes : 1));
    blocks_.push_back(block);
    GW_CUDA(cudaMemsetAsync(block, 0, bytes, stream_));
    return block;
  }
  void upload(void* to, const void* from_host, size_t bytes) override {
    GW_CUDA(cudaMemcpyAsync(to, from_host, bytes, cudaMemcpyHostToDevice, stream_));
    GW_CUDA(cudaStreamSynchronize(stream_));
  }
  void download(void* to_host, const void* from, size_t bytes) override {
    GW_CUDA(cudaMemcpyAsync(to_host, from, bytes, cudaMemcpyDeviceToHost, stream_));
    GW_CUDA(cudaStreamSynchronize(stream_));
  }
  void copy(void* to, const void* from, size_t bytes) override {
    GW_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
  }
  // The stream is held until everything is enqueued, so that the device's time is measured and not the host's.
  double time(const std::function<void()>& work) override {
    std::atomic<bool> go{false};
    GW_CUDA(cudaLaunchHostFunc(
        stream_, [](void* flag) { static_cast<std::atomic<bool>*>(flag)->wait(false); }, &go));
    GW_CUDA(cudaEventRecord(start_, stream_));
    try {
      work();
    } catch (...) {
      go = true;
      go.notify_all();
      cudaStreamSynchronize(stream_);
      throw;
    }
    GW_CUDA(cudaEventRecord(end_, stream_));
    go = true;
    go.notify_all();
    GW_CUDA(cudaEventSynchronize(end_));
    float milliseconds = 0;
    GW_CUDA(cudaEventElapsedTime(&milliseconds, start_, end_));
    return milliseconds * 1e-3;
  }
  size_t cache_bytes() const override { return cache_; }

 private:
  Device device_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t start_ = nullptr, end_ = nullptr;
  size_t cache_ = 0;
  std::vector<void*> blocks_;
};

}  // namespace

std::unique_ptr<BenchBackend> make_cuda_backend() { return std::make_unique<CudaBenchBackend>(); }

}  // namespace gradwire::app
