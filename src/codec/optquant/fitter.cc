// SPDX-License-Identifier: Apache-2.0
#include "codec/optquant/fitter.h"

#include "codec/optquant/levels.h"
#include "codec/refit.h"
#include "core/bits.h"

namespace gradwire {
namespace {

class LevelsFitter final : public RefitFitter {
 public:
  LevelsFitter(const Codec& codec, int world) : RefitFitter(codec) {
    const double given = number_of(codec, "workers");
    rule_ = {codec.get("mode") == "biased", number_of(codec, "kappa"), given > 0 ? given : world};
  }
  size_t counts() const override { return LevelHistogram::kCounts; }
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
    std::vector<uint32_t> table;
    for (float level : fit_levels(histogram, static_cast<int>(number_of(base_, "bits")), rule_).levels)
      table.push_back(float_bits(level));
    return table;
  }

  LevelRule rule_;
};

}  // namespace

std::unique_ptr<Fitter> optquant_fitter(const Codec& codec, const FitContext& context) {
  return std::make_unique<LevelsFitter>(codec, context.world);
}

}  // namespace gradwire
