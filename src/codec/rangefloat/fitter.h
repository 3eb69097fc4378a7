// SPDX-License-Identifier: Apache-2.0
// What learns the mantissa of range floats.
#pragma once

#include "codec/rangefloat/mantissa.h"
#include "codec/refit.h"

namespace gradwire {

// For codecs with the parameters bits, mantissa (0: learned), mode and refit.
class MantissaFitter : public RefitFitter {
 public:
  using RefitFitter::RefitFitter;
  bool due(uint64_t step) const override { return base_.get("mantissa") == "0" && RefitFitter::due(step); }
  size_t counts() const override { return MagnitudeHistogram{}.words().size(); }
  void observe(std::span<const float> values, std::span<const uint32_t> lengths, FitStats& stats) const override;

 protected:
  // Adds what becomes range floats, relative to the largest of each unit.
  virtual void add(MagnitudeHistogram& histogram, std::span<const WeightedSample::Unit> units) const = 0;
  std::vector<uint32_t> table_of(const FitStats& pooled) const override;
};

std::unique_ptr<Fitter> rangefloat_fitter(const Codec& codec, const FitContext& context);

}  // namespace gradwire
