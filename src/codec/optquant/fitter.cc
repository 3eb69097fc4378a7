// SPDX-License-Identifier: Apache-2.0
#include "codec/optquant/fitter.h"

#include "codec/optquant/levels.h"
#include "codec/refit.h"
#include "core/bits.h"

namespace gradwire {
namespace {

class LevelsFitter final : public RefitFitter {
 public:
  using RefitFitter::RefitFitter;
  size_t counts() const override { return LevelHistogram{}.counts.size(); }
  void observe(std::span<const float> values, std::span<const uint32_t> lengths, FitStats& stats) const override {
    LevelHistogram histogram;
    const WeightedSample sample(values, lengths, 20, WeightedSample::By::top);
    for (const auto& unit : sample.units) histogram.add(unit.values, unit.top, unit.weight);
    stats.add({sample.exponent, std::move(histogram.counts)});
  }

 private:
  std::vector<uint32_t> table_of(const FitStats& pooled) const override {
    LevelHistogram histogram;
    histogram.counts = pooled.counts;
    const LevelRule rule{base_.get("mode") == "biased", number_of(base_, "kappa"), number_of(base_, "workers")};
    std::vector<uint32_t> table;
    for (float level : fit_levels(histogram, static_cast<int>(number_of(base_, "bits")), rule).levels)
      table.push_back(float_bits(level));
    return table;
  }
};

}  // namespace

std::unique_ptr<Fitter> optquant_fitter(const Codec& codec, const FitContext&) {
  return std::make_unique<LevelsFitter>(codec);
}

}  // namespace gradwire
