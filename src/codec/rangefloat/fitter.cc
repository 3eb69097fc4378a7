// SPDX-License-Identifier: Apache-2.0
#include "codec/rangefloat/fitter.h"

#include <algorithm>

namespace gradwire {
namespace {

class RangeFloatFitter final : public MantissaFitter {
 public:
  using MantissaFitter::MantissaFitter;

 private:
  void add(MagnitudeHistogram& histogram, std::span<const WeightedSample::Unit> units) const override {
    const double fixed = number_of(base_, "max");
    for (const auto& unit : units)
      histogram.add(unit.values, fixed > 0 ? static_cast<float>(fixed) : unit.top, static_cast<uint32_t>(unit.weight));
  }
};

}  // namespace

void MantissaFitter::observe(std::span<const float> values, std::span<const uint32_t> lengths, FitStats& stats) const {
  MagnitudeHistogram histogram;
  const WeightedSample sample(values, lengths, 12, WeightedSample::By::top);
  add(histogram, sample.units);
  stats.add({sample.exponent, {histogram.words().begin(), histogram.words().end()}});
}

std::vector<uint32_t> MantissaFitter::table_of(const FitStats& pooled) const {
  MagnitudeHistogram histogram;
  std::copy(pooled.counts.begin(), pooled.counts.end(), histogram.words().begin());
  return {static_cast<uint32_t>(
      choose_mantissa(histogram, static_cast<int>(number_of(base_, "bits")), base_.get("mode") == "paper"))};
}

std::unique_ptr<Fitter> rangefloat_fitter(const Codec& codec, const FitContext&) {
  return std::make_unique<RangeFloatFitter>(codec);
}

}  // namespace gradwire
