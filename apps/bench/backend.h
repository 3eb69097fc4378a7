// SPDX-License-Identifier: Apache-2.0
// A BenchBackend says where the buffers of a command are and how work there is timed: host memory and the steady clock,
// or device memory and CUDA events. Measuring and file commands are therefore written once for both devices.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "gradwire/runner.h"

namespace gradwire::app {

class BenchBackend {
 public:
  virtual ~BenchBackend() = default;
  virtual const Device& device() const = 0;

  virtual void* allocate(size_t bytes) = 0;  // Its pages exist. It lives as long as the backend.
  virtual void upload(void* to, const void* from_host, size_t bytes) = 0;
  virtual void download(void* to_host, const void* from, size_t bytes) = 0;

  // The plain copy that codecs are compared with: memcpy, by as many threads as the device has, or a device copy.
  virtual void copy(void* to, const void* from, size_t bytes) = 0;

  // Seconds that `work` takes, from its first byte to its last. On a GPU `work` only enqueues.
  virtual double time(const std::function<void()>& work) = 0;

  // Inputs of up to this size would stay in a cache and flatter the figures, so several copies of them take turns.
  virtual size_t cache_bytes() const = 0;
};

struct BackendOptions {
  std::string device = "cpu";
  int threads = 1;
  std::string simd = {};
};

std::unique_ptr<BenchBackend> make_backend(
    const BackendOptions& options);  // Error{unsupported} when there is no such device

#ifdef GRADWIRE_HAS_CUDA
std::unique_ptr<BenchBackend> make_cuda_backend();
#endif

}  // namespace gradwire::app
