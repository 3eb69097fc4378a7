// SPDX-License-Identifier: Apache-2.0
// On the CPU every function here does nothing.
#include "collective/host_staging.h"

#include <utility>

namespace gradwire {

HostStaging::HostStaging(std::shared_ptr<Memory> memory, Messages messages) : memory_(std::move(memory)) {
  if (!memory_->on_host() && messages == Messages::on_host) buffer_.emplace(memory_, Buffer::Place::device, 0);
}

// A step that failed half-way may have left copies behind, from or to memory that is about to be released.
HostStaging::~HostStaging() {
  try {
    memory_->wait();
  } catch (...) {
    // A device that is broken has already been reported by the call that waited for it.
  }
}

void HostStaging::resize(size_t largest) {
  if (buffer_ && largest > buffer_->held()) buffer_->resize(largest);
}

Bytes HostStaging::writable(Bytes host) const { return buffer_ ? Bytes(buffer_->at(0), host.size()) : host; }

void HostStaging::written(Bytes host) {
  if (buffer_) memory_->start_to_host(host.data(), buffer_->at(0), host.size());
}

ConstBytes HostStaging::readable(ConstBytes host) {
  if (!buffer_) return host;
  memory_->start_from_host(buffer_->at(0), host.data(), host.size());
  return {buffer_->at(0), host.size()};
}

void HostStaging::wait() { memory_->wait(); }

}  // namespace gradwire
