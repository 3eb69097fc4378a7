// SPDX-License-Identifier: Apache-2.0
#include "codec/casq/fitter.h"

#include <algorithm>

#include "codec/casq/clusters.h"
#include "codec/refit.h"
#include "core/bits.h"

namespace gradwire {
namespace {

class ClusterFitter final : public RefitFitter {
 public:
  explicit ClusterFitter(const Codec& codec) : RefitFitter(codec, static_cast<uint64_t>(number_of(codec, "start"))) {}
  size_t counts() const override { return ClusterHistogram{}.words().size(); }
  void observe(std::span<const float> values, std::span<const uint32_t> lengths, FitStats& stats) const override {
    ClusterHistogram histogram;
    const WeightedSample sample(values, lengths, 12, WeightedSample::By::rms);
    for (const auto& unit : sample.units) histogram.add(unit.values, unit.rms, static_cast<uint32_t>(unit.weight));
    stats.add({sample.exponent, {histogram.words().begin(), histogram.words().end()}});
  }

 private:
  std::vector<uint32_t> table_of(const FitStats& pooled) const override {
    ClusterHistogram histogram;
    std::copy(pooled.counts.begin(), pooled.counts.end(), histogram.words().begin());
    const bool paper = base_.get("mode") == "paper";
    const int bits = static_cast<int>(number_of(base_, "bits"));
    const double budget = number_of(base_, "budget"), cut = number_of(base_, "cut");
    const Clusters clusters = fit_clusters(
        histogram, bits, budget, cut > 0 || paper ? ClusterMode::paper : ClusterMode::best, cut > 0 ? cut : 0.95);
    std::vector<uint32_t> table;
    for (float threshold : clusters.thresholds) table.push_back(float_bits(threshold));
    if (!paper) {
      table.insert(table.end(), clusters.order.begin(), clusters.order.end());
      return table;
    }
    // Shares in 2^-16 of the buckets, whatever their number will be.
    const std::string rule = base_.get("rule");
    std::vector<double> list(clusters.centres.size(), 200);
    list.front() = list.back() = 500000;
    const double seen = std::max(1.0, histogram.total());
    std::vector<double> counts = clusters.counts;
    for (double& count : counts) count *= 65536 / budget / seen;  // as many elements as 65536 buckets are for
    const std::vector<uint32_t> shares = rule == "optimal"   ? allocate_hash(counts, clusters.variances, 65536)
                                         : rule == "density" ? allocate_paper(clusters, PaperRule::density, 65536)
                                         : rule == "entropy" ? allocate_paper(clusters, PaperRule::entropy, 65536)
                                                             : allocate_paper(clusters, PaperRule::list, 65536, list);
    table.insert(table.end(), shares.begin(), shares.end());
    return table;
  }
};

}  // namespace

std::unique_ptr<Fitter> casq_fitter(const Codec& codec, const FitContext&) {
  return std::make_unique<ClusterFitter>(codec);
}

}  // namespace gradwire
