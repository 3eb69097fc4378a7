// SPDX-License-Identifier: Apache-2.0
// Where buffers that the library itself owns (residuals) live. All calls are synchronous; none is on a hot path.
#pragma once

#include <cstddef>
#include <memory>

#include "gradwire/runner.h"

namespace gradwire {

struct Memory {
  virtual ~Memory() = default;
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* data) = 0;
  virtual void zero(void* data, size_t bytes) = 0;
  virtual void to_host(void* host, const void* data, size_t bytes) = 0;
  virtual void from_host(void* data, const void* host, size_t bytes) = 0;
};

std::shared_ptr<Memory> memory_of(const Device& device);
std::shared_ptr<Memory> cuda_memory(int index);  // memory_cuda.cc; Error{unsupported} in a build without CUDA

}  // namespace gradwire
