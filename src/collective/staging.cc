// SPDX-License-Identifier: Apache-2.0
// Blocks and the way of a message between the host and the device. On the CPU every step of that way is nothing.
#include "collective/staging.h"

#include <utility>

namespace gradwire {

Block::Block(std::shared_ptr<Memory> memory, Place place, size_t bytes) : memory_(std::move(memory)), place_(place) {
  allocate(bytes);
}
Block::Block(Block&& other) noexcept
    : memory_(std::move(other.memory_)),
      place_(other.place_),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      capacity_(std::exchange(other.capacity_, 0)) {}
Block::~Block() { release(); }

void Block::resize(size_t bytes) {
  if (memory_->on_host() ? bytes != capacity_ : bytes > capacity_) {
    release();
    allocate(bytes);
  }
  size_ = bytes;
}

void Block::allocate(size_t bytes) {
  data_ = static_cast<std::byte*>(place_ == Place::host ? memory_->allocate_host(bytes) : memory_->allocate(bytes));
  size_ = capacity_ = bytes;
}

void Block::release() {
  if (data_ == nullptr) return;
  if (place_ == Place::host)
    memory_->release_host(data_);
  else
    memory_->release(data_);
  data_ = nullptr;
  size_ = capacity_ = 0;
}

Staging::Staging(std::shared_ptr<Memory> memory, bool direct) : memory_(std::move(memory)) {
  if (!memory_->on_host() && !direct) buffer_ = std::make_unique<Block>(memory_, Block::Place::device, 0);
}

// A step that failed half-way may have left copies behind, from or to memory that is about to go.
Staging::~Staging() {
  try {
    memory_->wait();
  } catch (...) {
    // What broke the device was told to whoever waited for it.
  }
}

void Staging::resize(size_t largest) {
  if (buffer_) buffer_->resize(largest);
}

Bytes Staging::writable(Bytes host) const { return buffer_ ? buffer_->bytes().first(host.size()) : host; }

void Staging::written(Bytes host) {
  if (buffer_) memory_->start_to_host(host.data(), buffer_->bytes().data(), host.size());
}

ConstBytes Staging::readable(ConstBytes host) {
  if (!buffer_) return host;
  memory_->start_from_host(buffer_->bytes().data(), host.data(), host.size());
  return buffer_->bytes().first(host.size());
}

void Staging::wait() { memory_->wait(); }

}  // namespace gradwire
