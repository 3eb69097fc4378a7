// SPDX-License-Identifier: Apache-2.0
// The benchmark backend in host memory, and the choice between backends.
#include "bench/backend.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "bench/measure.h"
#include "gradwire/error.h"

namespace gradwire::app {
namespace {

class HostBenchBackend final : public BenchBackend {
 public:
  HostBenchBackend(int threads, const std::string& simd) : team_(threads) {
    device_.threads = threads;
    device_.simd = simd;
  }
  ~HostBenchBackend() override {
    for (void* block : blocks_) std::free(block);
  }
  const Device& device() const override { return device_; }
  void* allocate(size_t bytes) override {
    constexpr size_t kAlignment = 4096;
    bytes = (bytes + kAlignment) / kAlignment * kAlignment;
    void* block = std::aligned_alloc(kAlignment, bytes);
    if (block == nullptr) throw std::bad_alloc();
    blocks_.push_back(block);
    std::memset(block, 0, bytes);
    return block;
  }
  void upload(void* to, const void* from_host, size_t bytes) override { move(to, from_host, bytes); }
  void download(void* to_host, const void* from, size_t bytes) override { move(to_host, from, bytes); }
  void copy(void* to, const void* from, size_t bytes) override {
    if (team_.threads() == 1) return move(to, from, bytes);
    team_.run([&](int i) {
      const ThreadShare share = share_of(bytes, i, team_.threads(), 4096);
      move(static_cast<char*>(to) + share.begin, static_cast<const char*>(from) + share.begin, share.end - share.begin);
    });
  }
  double time(const std::function<void()>& work) override {
    const double start = seconds_now();
    work();
    return seconds_now() - start;
  }
  size_t cache_bytes() const override { return 0; }  // on a CPU the caches count as part of the machine

 private:
  static void move(void* to, const void* from, size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  Device device_;
  ThreadTeam team_;
  std::vector<void*> blocks_;
};

}  // namespace

std::unique_ptr<BenchBackend> make_backend(const BackendOptions& options) {
  if (options.device == "cpu") return std::make_unique<HostBenchBackend>(options.threads, options.simd);
#ifdef GRADWIRE_HAS_CUDA
  if (cuda_devices() == 0) throw Error(ErrorKind::unsupported, "--device cuda: " + cuda_description(), "device");
  return make_cuda_backend();
#else
  throw Error(ErrorKind::unsupported, "--device cuda: this build has no CUDA drivers; see gradwire doctor", "device");
#endif
}

}  // namespace gradwire::app
