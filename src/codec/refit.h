// SPDX-License-Identifier: Apache-2.0
// What most fitters share: a table that is fitted anew from time to time, from a sample of units.
#pragma once

#include <string>

#include "codec/fitter.h"

namespace gradwire {

double number_of(const Codec& codec, const char* parameter);
[[noreturn]] void refuse_state(const Codec& codec, const std::string& why);  // Error{frame, "learned"}

// The units of a sample that are finite and not all zero, each with a weight: its share of the squared norms, in
// 2^-digits of the largest.
struct WeightedSample {
  struct Unit {
    std::span<const float> values;
    float top;   // the largest magnitude
    double rms;  // 0 with By::top
    int64_t weight;
  };
  std::vector<Unit> units;
  int64_t exponent = FitStats::kNone;

  enum class By { top, rms };
  WeightedSample(std::span<const float> values, std::span<const uint32_t> lengths, int digits, By by);
};

// Fits after steps 1, 2, 4, 8, ... and then after every `refit` steps (parameters.h). Before step `start`, fp32 is
// sent.
class RefitFitter : public Fitter {
 public:
  explicit RefitFitter(const Codec& codec, uint64_t start = 0);

  bool due(uint64_t step) const override;
  Codec codec(uint64_t step, double) const override { return step < start_ ? Codec() : current_; }
  void learn(uint64_t, const FitStats& pooled) override;
  std::vector<uint64_t> save() const override { return {table_.begin(), table_.end()}; }
  void restore(std::span<const uint64_t> state) override;

 protected:
  virtual std::vector<uint32_t> table_of(const FitStats& pooled) const = 0;
  Codec base_;
  uint64_t start_, refit_;
  std::vector<uint32_t> table_;
  Codec current_ = base_;
};

}  // namespace gradwire
