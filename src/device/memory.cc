// SPDX-License-Identifier: Apache-2.0
#include "device/memory.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "gradwire/error.h"

namespace gradwire {
namespace {

struct HostMemory final : Memory {
  bool on_host() const override { return true; }
  void* allocate(size_t bytes) override { return ::operator new (bytes ? bytes : 1, std::align_val_t{64}); }
  void release(void* data) override { ::operator delete (data, std::align_val_t{64}); }
  void zero(void* data, size_t bytes) override { std::memset(data, 0, bytes); }
  void to_host(void* host, const void* data, size_t bytes) override {
    if (bytes) std::memcpy(host, data, bytes);
  }
  void from_host(void* data, const void* host, size_t bytes) override {
    if (bytes) std::memcpy(data, host, bytes);
  }
  void* allocate_host(size_t bytes) override { return allocate(bytes); }
  void release_host(void* data) override { release(data); }
  void start_to_host(void* host, const void* data, size_t bytes) override { to_host(host, data, bytes); }
  void start_from_host(void* data, const void* host, size_t bytes) override { from_host(data, host, bytes); }
  void copy(void* to, const void* from, size_t bytes) override { to_host(to, from, bytes); }
  void wait() override {}
};

}  // namespace

std::shared_ptr<Memory> memory_of(const Device& device) {
  if (device.kind == Device::Kind::cuda) return cuda_memory(device.index, device.stream);
  return std::make_shared<HostMemory>();
}

void no_cuda() {
  throw Error(ErrorKind::unsupported, "this build has no CUDA: configure it where nvcc is found", "device");
}

#if !defined(GRADWIRE_HAS_CUDA)
std::shared_ptr<Memory> cuda_memory(int, void*) { no_cuda(); }
#endif

}  // namespace gradwire
