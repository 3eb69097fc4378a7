// SPDX-License-Identifier: Apache-2.0
// When a codec pays (the performance model of Wang et al., HPDC 2020, for any codec): an all-reduce of `world` ranks
// takes the time of the codec and the time of the link, so there is a speed of the link below which fewer bytes are
// worth the work. The model has no overlap of the two; with overlap a codec pays on faster links too.
#pragma once

#include <optional>

namespace gradwire::app {

// One rank's share of an all-reduce by scatter: it encodes all elements once and those of its own shard again, and
// decodes as many elements twice. Every byte of a message travels 2 (world - 1) / world times.
struct CodecCost {
  double bytes;                   // of a message with all elements
  double first_encode = 0;        // seconds for all elements, with error feedback if the codec uses it
  double encode = 0, decode = 0;  // seconds for all elements

  double seconds(int world) const { return first_encode + encode / world + 2 * decode; }
};

// Gb/s below which `codec` is faster than `rival`: 0 where it never is, nothing where it always is.
inline std::optional<double> break_even_gbps(const CodecCost& codec, const CodecCost& rival, int world) {
  const double saved = 2.0 * (world - 1) / world * (rival.bytes - codec.bytes) * 8e-9;
  const double added = codec.seconds(world) - rival.seconds(world);
  if (saved <= 0) return 0.0;
  if (added <= 0) return std::nullopt;
  return saved / added;
}

}  // namespace gradwire::app
