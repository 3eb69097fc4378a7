// SPDX-License-Identifier: Apache-2.0
#include "device/buffer.h"

#include <utility>

namespace gradwire {

Buffer::Buffer(std::shared_ptr<Memory> memory, Place place, size_t bytes) : memory_(std::move(memory)), place_(place) {
  allocate(bytes);
}
Buffer::Buffer(Buffer&& other) noexcept
    : memory_(std::move(other.memory_)),
      place_(other.place_),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      capacity_(std::exchange(other.capacity_, 0)) {}
Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(place_, other.place_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(capacity_, other.capacity_);
  return *this;
}
Buffer::~Buffer() { release(); }

void Buffer::resize(size_t bytes) {
  if (memory_->on_host() ? bytes != capacity_ : bytes > capacity_) {
    release();
    allocate(bytes);
  }
  size_ = bytes;
}

void Buffer::allocate(size_t bytes) {
  data_ = static_cast<std::byte*>(place_ == Place::host ? memory_->allocate_host(bytes) : memory_->allocate(bytes));
  size_ = capacity_ = bytes;
}

void Buffer::release() {
  if (data_ == nullptr) return;
  if (place_ == Place::host)
    memory_->release_host(data_);
  else
    memory_->release(data_);
  data_ = nullptr;
  size_ = capacity_ = 0;
}

}  // namespace gradwire
