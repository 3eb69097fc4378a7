// SPDX-License-Identifier: Apache-2.0
// Bytes that the library owns, aligned for vectors and not initialised: where the tensors are (Place::device), or in
// memory of the host that engines reach and a GPU copies from by itself (Place::host).
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "device/memory.h"

namespace gradwire {

class Buffer {
 public:
  enum class Place { host, device };
  Buffer(std::shared_ptr<Memory> memory, Place place, size_t bytes);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;  // swaps
  ~Buffer();

  // The contents are lost. Memory that a GPU uses is expensive to allocate: it grows and never shrinks.
  void resize(size_t bytes);
  std::span<std::byte> bytes() const { return {data_, size_}; }
  std::byte* at(uint64_t byte) const { return data_ + byte; }
  float* floats() const { return reinterpret_cast<float*>(data_); }
  uint64_t held() const { return capacity_; }

 private:
  void allocate(size_t bytes);
  void release();

  std::shared_ptr<Memory> memory_;
  Place place_;
  std::byte* data_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
};

}  // namespace gradwire
