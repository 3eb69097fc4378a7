// SPDX-License-Identifier: Apache-2.0
// What learns the table of a codec while a model trains: which statistics it wants, and which table follows from them.
// Each learning codec has one in its folder (CodecDef::fitter). When statistics are taken, from which elements, and how
// ranks share them is learn/'s.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gradwire/codec.h"

namespace gradwire {

// Counts in units of 2^exponent: ranks whose gradients differ in scale are added up by shifting, still as integers.
struct FitStats {
  int64_t exponent = kNone;
  std::vector<int64_t> counts;

  static constexpr int64_t kNone = INT64_MIN / 2;  // nothing was seen
  void add(const FitStats& other);
};

// What a fitter is told about the run that it learns in.
struct FitContext {
  uint64_t elements = 1;  // that one rank sends with the codec in a step
  int world = 1;          // ranks
  uint64_t steps = 0;     // of the run; 0: not known
  double share = 1;       // of the model's elements that are learned for here
};

class Fitter {
 public:
  virtual ~Fitter() = default;
  enum class Source { sample, scales };
  virtual Source source() const { return Source::sample; }
  virtual bool due(uint64_t step) const = 0;  // statistics of this step are wanted
  // Statistics of a step are wanted before it is encoded.
  virtual bool ahead() const { return false; }
  virtual size_t counts() const = 0;                          // length of FitStats::counts
  virtual Codec codec(uint64_t step, double rate) const = 0;  // what `step` is encoded with

  // Source::sample: units (buckets, tiles, chunks) one after the other; not all of them need be finite.
  virtual void observe(std::span<const float> /*values*/, std::span<const uint32_t> /*lengths*/, FitStats&) const {}
  // Source::scales: the first scale of units, and how many elements each unit has.
  virtual void observe_scales(std::span<const uint32_t> /*scales*/, std::span<const uint32_t> /*elements*/,
                              FitStats&) const {}
  virtual void learn(uint64_t step, const FitStats& pooled) = 0;

  // What it plans with, in a line for people; empty where there is no plan.
  virtual std::string plan() const { return {}; }

  virtual std::vector<uint64_t> save() const = 0;
  virtual void restore(std::span<const uint64_t> state) = 0;  // throws Error{frame, "learned"}
};

}  // namespace gradwire
