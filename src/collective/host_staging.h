// SPDX-License-Identifier: Apache-2.0
// Engines move memory of the host; codecs work where the tensors are. On the CPU that is the same place, and a message
// is written and read where the engine finds it. On a GPU the messages pass, one after the other in the order of the
// stream, through one buffer of the device, and between it and page-locked memory of the host by copies that are only
// enqueued. wait() must therefore come before the engine is given what was written, and before decoded values are read.
//
// With `Messages::in_place` nothing is staged: the caller moves the messages from and to where the tensors are.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "device/buffer.h"
#include "gradwire/engine.h"

namespace gradwire {

enum class Messages { on_host, in_place };

class HostStaging {
 public:
  HostStaging(std::shared_ptr<Memory> memory, Messages messages);
  ~HostStaging();  // waits until no copy is under way
  HostStaging(const HostStaging&) = delete;
  HostStaging& operator=(const HostStaging&) = delete;

  void resize(size_t largest);  // of the messages that will pass
  // Where a message for `host` is to be written; written() then starts its copy.
  Bytes writable(Bytes host) const;
  void written(Bytes host);
  // Where a message that lies in `host` can be read, until the next one.
  ConstBytes readable(ConstBytes host);
  void wait();
  uint64_t held() const { return buffer_ ? buffer_->held() : 0; }

 private:
  std::shared_ptr<Memory> memory_;
  std::optional<Buffer> buffer_;  // on a GPU
};

}  // namespace gradwire
