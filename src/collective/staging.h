// SPDX-License-Identifier: Apache-2.0
// Engines move memory of the host; codecs work where the tensors are. On the CPU that is the same place, and a message
// is written and read where the engine finds it. On a GPU all messages of a stage pass, one after the other in the
// order of the stream, through one buffer of the device, and between it and page-locked memory of the host by copies
// that are only enqueued: wait() comes before the engine is given what was written, and before anybody reads what was
// decoded.
#pragma once

#include <cstdint>
#include <memory>

#include "device/memory.h"
#include "gradwire/engine.h"

namespace gradwire {

// Bytes aligned for vectors, not initialised: on the host, where engines reach them, or where the tensors are.
class Block {
 public:
  enum class Place { host, device };
  Block(std::shared_ptr<Memory> memory, Place place, size_t bytes);
  Block(Block&& other) noexcept;
  Block& operator=(Block&&) = delete;
  ~Block();

  // The contents are lost. Memory that a GPU uses is dear to make: it grows and never shrinks.
  void resize(size_t bytes);
  Bytes bytes() const { return {data_, size_}; }
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

class Staging {
 public:
  // `direct`: messages are written and read where the tensors are, and somebody else carries them from there.
  explicit Staging(std::shared_ptr<Memory> memory, bool direct = false);
  ~Staging();  // nothing is under way any more
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  void resize(size_t largest);  // of the messages that will pass
  // Where a message for `host` is to be written, and that it now was.
  Bytes writable(Bytes host) const;
  void written(Bytes host);
  // Where a message that lies in `host` can be read, until the next one.
  ConstBytes readable(ConstBytes host);
  void wait();
  uint64_t held() const { return buffer_ ? buffer_->held() : 0; }

 private:
  std::shared_ptr<Memory> memory_;
  std::unique_ptr<Block> buffer_;  // on a GPU
};

}  // namespace gradwire
