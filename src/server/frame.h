// SPDX-License-Identifier: Apache-2.0
// What a worker and the parameter server say to each other: frames, each a head of 96 bytes and a payload, which is a
// message of the wire format (docs/wire-format.md) or a JSON text. Behind a message there may be a tail: statistics go
// up behind an update, and what codecs have learned from them comes down behind weights (shard_learning.h).
// docs/server.md has the protocol in words. The transport keeps frames whole and in order; every reader treats them as
// hostile.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

namespace gradwire::server {

inline constexpr uint16_t kProtocol = 2;
inline constexpr size_t kFrameHead = 96;
inline constexpr size_t kMaxFrame = size_t{64} << 20;  // bytes; shards are small enough that no message comes near it
inline constexpr size_t kMaxText = size_t{16} << 20;
inline constexpr uint64_t kNone = ~uint64_t{0};
inline constexpr uint64_t kMaxAhead = uint64_t{1} << 20;  // steps that a worker may be ahead of a restarted server

// The numbers are the protocol.
enum class FrameKind : uint8_t {
  // from a worker
  hello = 1,     // text: id, name and signature
  initial = 2,   // shard: the first weights, if the server has none
  update = 3,    // shard, step it was computed at, sequence, tally: a compressed update
  pull = 4,      // shard, step: weights of that step or a later one are wanted; no update will come for an earlier one
  residual = 5,  // shard, sequence, tally: the residual of a worker that leaves, in fp32
  buffers = 6,   // what the model keeps beside its parameters, in fp32
  report = 7,    // text: loss and the like, for people
  goodbye = 8,   // nothing more will come; answered by a notice when the residual is on disk
  // from the server
  welcome = 65,  // text: what a worker needs to begin or to go on
  weights = 66,  // shard, step: answers update, pull and residual
  durable = 67,  // text: what is on disk
  notice = 68,   // text: the server goes away, and will be back
};

// What became of an update. Only `applied` and `again` mean that it counts.
enum class UpdateStatus : uint8_t {
  none = 0,
  applied = 1,
  again = 2,    // it had been applied before
  late = 3,     // its step is over, or it is too stale: it goes back to the worker's residual
  early = 4,    // its step has not come here: workers have to bring a restarted server to it first
  corrupt = 5,  // it cannot be read, or is not finite: it goes back to the worker's residual
};

enum Flag : uint8_t {
  kQuiet = 1,        // from a worker: only the status is wanted, no weights
  kWhole = 2,        // from the server: the payload is all weights in fp32, not what the down codec sends
  kBufferOwner = 4,  // from the server: this worker is the one whose buffers are kept
  kNotFinite = 8,    // pull: the worker sends no update for the step before, because its gradient was not finite
};

// What a worker has computed for one shard since it first joined, and what of it has not been applied: numbers with
// which any linear bookkeeping can be checked (ledger.h).
struct Tally {
  double computed = 0, squares = 0, residual = 0;
  Tally& operator+=(const Tally& other) {
    computed += other.computed;
    squares += other.squares;
    residual += other.residual;
    return *this;
  }
};

struct Frame {
  FrameKind kind = FrameKind::notice;
  UpdateStatus status = UpdateStatus::none;  // of the update that is answered
  uint8_t flags = 0;
  uint32_t shard = 0;
  uint32_t contributors = 0;  // of the step that made these weights
  uint64_t step = 0;
  uint64_t sequence = 0;  // of the update that is sent or answered
  uint64_t held = kNone;  // worker: the step of the weights it holds of this shard. Server: the step on disk
  Tally tally = {};
  float rate = 0;     // update, residual: the learning rate, where the server runs SGD
  uint64_t tail = 0;  // update, weights: bytes at the end of the payload that are not of its message
};

using Blob = std::shared_ptr<const std::vector<std::byte>>;
Blob make_blob(std::vector<std::byte> bytes);
Blob text_blob(const nlohmann::json& text);

// The two parts of the payload of a frame whose head has been read.
std::span<const std::byte> message_part(const Frame& frame, const Blob& payload);
std::span<const std::byte> tail_part(const Frame& frame, const Blob& payload);

std::array<std::byte, kFrameHead> write_head(const Frame& frame, size_t payload_bytes);
// Throws Error{frame} naming the field.
Frame read_frame_head(std::span<const std::byte> bytes, size_t payload_bytes);
nlohmann::json read_text(std::span<const std::byte> payload);  // an object, or Error{frame, "text"}

}  // namespace gradwire::server
