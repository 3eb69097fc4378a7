// SPDX-License-Identifier: Apache-2.0
// The head, little-endian:
//
//   0 magic "GWPS"   4 protocol u16   6 kind u8   7 status u8   8 shard u32   12 contributors u32   16 step u64
//   24 sequence u64   32 held u64   40 payload bytes u64   48 computed f64   56 squares f64   64 residual f64
//   72 flags u8, 3 zeros   76 rate f32   80 tail bytes u64   88 check u64: XXH64 of the 88 bytes before it
#include "server/frame.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <cmath>
#include <cstring>

#include "gradwire/error.h"
#include "io/json.h"

namespace gradwire::server {
namespace {

constexpr uint32_t kFrameMagic = 0x53505747u;  // "GWPS"
constexpr float kMostRate = 1e6f;

template <class T>
void put(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

template <class T>
T get(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

[[noreturn]] void refuse(const char* field, const std::string& words) {
  throw Error(ErrorKind::frame, fmt::format("bad frame: {} {}", field, words), field);
}

bool known(FrameKind kind) {
  const auto number = static_cast<uint8_t>(kind);
  return (number >= 1 && number <= 8) || (number >= 65 && number <= 68);
}

}  // namespace

Blob make_blob(std::vector<std::byte> bytes) {
  return std::make_shared<const std::vector<std::byte>>(std::move(bytes));
}

Blob text_blob(const nlohmann::json& text) {
  const std::string words = text.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  std::vector<std::byte> bytes(words.size());
  std::memcpy(bytes.data(), words.data(), words.size());
  return make_blob(std::move(bytes));
}

std::span<const std::byte> message_part(const Frame& frame, const Blob& payload) {
  return std::span(*payload).first(payload->size() - frame.tail);
}

std::span<const std::byte> tail_part(const Frame& frame, const Blob& payload) {
  return std::span(*payload).last(frame.tail);
}

std::array<std::byte, kFrameHead> write_head(const Frame& frame, size_t payload_bytes) {
  std::array<std::byte, kFrameHead> head{};
  std::byte* at = head.data();
  put(at, kFrameMagic);
  put(at + 4, kProtocol);
  put(at + 6, frame.kind);
  put(at + 7, frame.status);
  put(at + 8, frame.shard);
  put(at + 12, frame.contributors);
  put(at + 16, frame.step);
  put(at + 24, frame.sequence);
  put(at + 32, frame.held);
  put(at + 40, uint64_t{payload_bytes});
  put(at + 48, frame.tally.computed);
  put(at + 56, frame.tally.squares);
  put(at + 64, frame.tally.residual);
  put(at + 72, frame.flags);
  put(at + 76, frame.rate);
  put(at + 80, frame.tail);
  put(at + 88, uint64_t{XXH64(at, 88, 0)});
  return head;
}

Frame read_frame_head(std::span<const std::byte> bytes, size_t payload_bytes) {
  if (bytes.size() < kFrameHead) refuse("length", fmt::format("is {} bytes; a head has {}", bytes.size(), kFrameHead));
  const std::byte* at = bytes.data();
  if (get<uint32_t>(at) != kFrameMagic) refuse("magic", "is not GWPS");
  // Before the check: another version may have another head.
  if (const auto protocol = get<uint16_t>(at + 4); protocol != kProtocol)
    refuse("protocol", fmt::format("is {}; this program speaks {}", protocol, kProtocol));
  if (get<uint64_t>(at + 88) != XXH64(at, 88, 0)) refuse("check", "does not match: the head was altered");
  Frame frame;
  frame.kind = get<FrameKind>(at + 6);
  frame.status = get<UpdateStatus>(at + 7);
  frame.shard = get<uint32_t>(at + 8);
  frame.contributors = get<uint32_t>(at + 12);
  frame.step = get<uint64_t>(at + 16);
  frame.sequence = get<uint64_t>(at + 24);
  frame.held = get<uint64_t>(at + 32);
  frame.tally = {get<double>(at + 48), get<double>(at + 56), get<double>(at + 64)};
  frame.flags = get<uint8_t>(at + 72);
  frame.rate = get<float>(at + 76);
  frame.tail = get<uint64_t>(at + 80);
  if (!known(frame.kind)) refuse("kind", fmt::format("is {}, which is unknown", static_cast<int>(frame.kind)));
  if (frame.status > UpdateStatus::corrupt)
    refuse("status", fmt::format("is {}, which is unknown", static_cast<int>(frame.status)));
  if (frame.flags > (kQuiet | kWhole | kBufferOwner | kNotFinite))
    refuse("flags", fmt::format("are {}, which are unknown", frame.flags));
  if ((frame.flags & kNotFinite) && frame.kind != FrameKind::pull)
    refuse("flags", fmt::format("are {}; only a pull says that a gradient was not finite", frame.flags));
  if (const auto said = get<uint64_t>(at + 40); said != payload_bytes)
    refuse("payload", fmt::format("has {} bytes; the head says {}", payload_bytes, said));
  if (!(frame.rate >= 0 && frame.rate <= kMostRate))
    refuse("rate", fmt::format("is {}; allowed are 0 to {}", frame.rate, kMostRate));
  if (frame.tail > payload_bytes ||
      (frame.tail > 0 && frame.kind != FrameKind::update && frame.kind != FrameKind::weights))
    refuse("tail", fmt::format("has {} bytes of {}; only an update and weights have one", frame.tail, payload_bytes));
  if (!std::isfinite(frame.tally.computed) || !std::isfinite(frame.tally.squares) ||
      !std::isfinite(frame.tally.residual))
    refuse("tally", "is not finite");
  return frame;
}

nlohmann::json read_text(std::span<const std::byte> payload) {
  if (payload.size() > kMaxText) refuse("text", fmt::format("has {} bytes; allowed are {}", payload.size(), kMaxText));
  std::string error;
  nlohmann::json text = io::parse_bounded({reinterpret_cast<const char*>(payload.data()), payload.size()}, error);
  if (!error.empty()) refuse("text", error);
  if (!text.is_object()) refuse("text", "is not a JSON object");
  return text;
}

}  // namespace gradwire::server
