// SPDX-License-Identifier: Apache-2.0
// Where buffers that the library itself owns (residuals, sums, messages) live, and how bytes get there from the host. A
// GPU works in the order of one stream, the Device's; the default stream is never used unless that is the one given.
#pragma once

#include <cstddef>
#include <memory>

#include "gradwire/runner.h"

namespace gradwire {

struct Memory {
  virtual ~Memory() = default;
  virtual bool on_host() const = 0;  // the processor itself can read and write what allocate() gives
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* data) = 0;

  // Each is done when it returns, and comes after what was enqueued on the stream before. None is on a hot path.
  virtual void zero(void* data, size_t bytes) = 0;
  virtual void to_host(void* host, const void* data, size_t bytes) = 0;
  virtual void from_host(void* data, const void* host, size_t bytes) = 0;

  // Memory of the host that a GPU copies from and to by itself (page-locked), and copies with it that are only
  // enqueued: it must stay, and be left alone, until wait() returns.
  virtual void* allocate_host(size_t bytes) = 0;
  virtual void release_host(void* data) = 0;
  virtual void start_to_host(void* host, const void* data, size_t bytes) = 0;
  virtual void start_from_host(void* data, const void* host, size_t bytes) = 0;
  virtual void copy(void* to, const void* from,
                    size_t bytes) = 0;  // both where allocate() gives memory; on a GPU only enqueued
  virtual void wait() = 0;
};

std::shared_ptr<Memory> memory_of(const Device& device);
[[noreturn]] void no_cuda();  // Error{unsupported}: what a GPU's part of a build without CUDA says
// memory_cuda.cc; no_cuda() in a build without.
std::shared_ptr<Memory> cuda_memory(int index, void* stream);

}  // namespace gradwire
