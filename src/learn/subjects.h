// SPDX-License-Identifier: Apache-2.0
// What is to be learned about each codec: what evidence is, and which table follows from it. The course of learning (when, from where,
// by whom) is learner.cc's.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "gradwire/codec.h"

namespace gradwire {

// Counts in units of 2^exponent: ranks whose gradients differ in scale are added up by shifting, still as integers.
struct Evidence {
  int64_t exponent = kNone;
  std::vector<int64_t> counts;

  static constexpr int64_t kNone = INT64_MIN / 2;  // nothing was seen
  void add(const Evidence& other);
};

class Subject {
 public:
  virtual ~Subject() = default;
  enum class Source { sample, sides };
  virtual Source source() const { return Source::sample; }
  virtual bool due(uint64_t step) const = 0;  // evidence of this step is wanted
  virtual bool ahead() const { return false; }
  virtual size_t counts() const = 0;  // of its evidence
  virtual Codec codec(uint64_t step, double rate) const = 0;

  // Units (buckets, tiles, chunks) one after the other; not all of a unit need be finite.
  virtual void look(std::span<const float>, std::span<const uint32_t>, Evidence&) const {}
  // Side values and elements of units.
  virtual void look_sides(std::span<const uint32_t>, std::span<const uint32_t>, Evidence&) const {}
  virtual void learn(uint64_t step, const Evidence& pooled) = 0;

  virtual std::vector<uint64_t> save() const = 0;
  virtual void restore(std::span<const uint64_t> state) = 0;  // throws Error{frame, "learned"}
};

// Null for codecs that learn nothing.
std::unique_ptr<Subject> subject_of(const Codec& codec, uint64_t elements, int world);

}  // namespace gradwire
