// SPDX-License-Identifier: Apache-2.0
// What a worker and the parameter server say to each other: frames, each a head of 96 bytes and a payload, which is a
// message of the wire format (docs/wire-format.md) or a JSON text. docs/server.md has the protocol in words. The
// transport keeps frames whole and in order; who reads one treats it as hostile.
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

inline constexpr uint16_t kProtocol = 1;
inline constexpr size_t kFrameHead = 96;
inline constexpr size_t kMaxFrame = size_t{64} << 20;  // bytes; parts are cut so that no message comes near it
inline constexpr size_t kMaxText = size_t{16} << 20;
inline constexpr uint64_t kNone = ~uint64_t{0};
inline constexpr uint64_t kMaxAhead = uint64_t{1} << 20;  // steps that a worker may be ahead of a restarted server

// The numbers are the protocol.
enum class Kind : uint8_t {
  // from a worker
  hello = 1,    // text: who it is, what it trains
  initial = 2,  // part: the first weights, if the server has none
  update = 3,   // part, step it was computed at, sequence, tallies: a compressed update
  pull = 4,  // part, step: weights of that step or a later one are wanted, and no update for an earlier one will come
  handover = 5,  // part, sequence, tallies: what a leaving worker still owes, by fp32
  buffers = 6,   // by fp32: what the model keeps beside its parameters
  report = 7,    // text: loss and the like, for people
  goodbye = 8,
  // from the server
  welcome = 65,  // text: what a worker needs to begin or to go on
  weights = 66,  // part, step: answers update, pull, initial and handover
  durable = 67,  // text: what is on disk
  notice = 68,   // text: the server goes away, and will be back
};

// What became of an update. Only `applied` and `again` mean that it counts.
enum class Verdict : uint8_t {
  none = 0,
  applied = 1,
  again = 2,    // it had been applied before
  late = 3,     // its step is over, or it is too stale: it goes back to the worker's residual
  early = 4,    // its step has not come here: a server that was restarted has to be brought up first
  corrupt = 5,  // it cannot be read, or holds what is not finite: back to the residual
};

enum Flag : uint8_t {
  kQuiet = 1,   // worker: no weights, please, only the verdict
  kWhole = 2,   // server: the payload is all weights by fp32, not what the down codec sends
  kKeeper = 4,  // server: this worker is the one whose buffers are kept
};

// What a worker has computed and what of it has not been applied, of one part, since it first joined. Numbers that any
// linear bookkeeping can be checked with: see ledger.h.
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
  Kind kind = Kind::notice;
  Verdict verdict = Verdict::none;
  uint8_t flags = 0;
  uint32_t part = 0;
  uint32_t contributors = 0;  // of the step that made these weights
  uint64_t step = 0;
  uint64_t sequence = 0;  // of the update that is sent or answered
  uint64_t held = kNone;  // worker: the step of the weights it holds of this part. Server: the step on disk
  Tally tally = {};
};

using Blob = std::shared_ptr<const std::vector<std::byte>>;
Blob make_blob(std::vector<std::byte> bytes);
Blob text_blob(const nlohmann::json& text);

std::array<std::byte, kFrameHead> write_head(const Frame& frame, size_t payload_bytes);
// Throws Error{frame} naming the field.
Frame read_frame_head(std::span<const std::byte> bytes, size_t payload_bytes);
nlohmann::json read_text(std::span<const std::byte> payload);  // an object, or Error{frame, "text"}

}  // namespace gradwire::server
