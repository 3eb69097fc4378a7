// SPDX-License-Identifier: Apache-2.0
// A Bed is where a command's buffers lie and how work there is timed, so that measuring and file commands are written
// once for both devices: host memory and the steady clock, or device memory and CUDA events.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "gradwire/runner.h"

namespace gradwire::app {

class Bed {
 public:
  virtual ~Bed() = default;
  virtual const Device& device() const = 0;

  virtual void* allocate(size_t bytes) = 0;  // touched, so that its pages exist; lives as long as the bed
  virtual void upload(void* to, const void* from_host, size_t bytes) = 0;
  virtual void download(void* to_host, const void* from, size_t bytes) = 0;

  // The plain copy that codecs are compared with: memcpy, by as many threads as the device has, or a device copy.
  virtual void copy(void* to, const void* from, size_t bytes) = 0;

  // Seconds that `work` takes, from its first byte to its last. On a GPU `work` only enqueues.
  virtual double time(const std::function<void()>& work) = 0;

  // Working sets up to this size stay in a cache that would flatter the figures, so inputs are rotated beyond it.
  virtual size_t cache_bytes() const = 0;
};

struct BedOptions {
  std::string device = "cpu";
  int threads = 1;
  std::string simd = {};
};

std::unique_ptr<Bed> make_bed(const BedOptions& options);  // Error{unsupported} when there is no such device

#ifdef GRADWIRE_HAS_CUDA
std::unique_ptr<Bed> make_cuda_bed();
#endif

}  // namespace gradwire::app
