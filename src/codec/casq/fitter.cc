// SPDX-License-Identifier: Apache-2.0
#include "codec/casq/fitter.h"

#include <algorithm>

#include "codec/casq/cluster_table.h"
#include "codec/casq/clusters.h"
#include "codec/refit.h"

namespace gradwire {
namespace {

class ClusterFitter final : public RefitFitter {
 public:
  explicit ClusterFitter(const Codec& codec) : RefitFitter(codec, static_cast<uint64_t>(number_of(codec, "start"))) {}

  // In tiles the two signs take turns, step by step: other_sign_first() says why. The step's number alone decides whose
  // turn it is, so that all ranks and a restored run agree. A single message, which is that of step 1, has the order
  // with the least error.
  Codec codec(uint64_t step, double rate) const override {
    const bool turns = !paper() && step >= start_ && step % 2 == 0 && (!table_.empty() || refit_ == 0);
    if (!turns) return RefitFitter::codec(step, rate);
    const auto bits = static_cast<uint32_t>(number_of(base_, "bits"));
    return base_.fitted(words_of(other_sign_first(read_clusters(bits, false, table_))));
  }

  size_t counts() const override { return ClusterHistogram{}.words().size(); }
  void observe(std::span<const float> values, std::span<const uint32_t> lengths, FitStats& stats) const override {
    ClusterHistogram histogram;
    const WeightedSample sample(values, lengths, 12, WeightedSample::By::rms);
    for (const auto& unit : sample.units) histogram.add(unit.values, unit.rms, static_cast<uint32_t>(unit.weight));
    stats.add({sample.exponent, {histogram.words().begin(), histogram.words().end()}});
  }

 private:
  bool paper() const { return base_.get("mode") == "paper"; }

  std::vector<uint32_t> table_of(const FitStats& pooled) const override {
    ClusterHistogram histogram;
    std::copy(pooled.counts.begin(), pooled.counts.end(), histogram.words().begin());
    const int bits = static_cast<int>(number_of(base_, "bits"));
    const double budget = number_of(base_, "budget"), cut = number_of(base_, "cut");
    const Clusters clusters = fit_clusters(
        histogram, bits, budget, cut > 0 || paper() ? ClusterMode::paper : ClusterMode::best, cut > 0 ? cut : 0.95);
    if (!paper()) return words_of({clusters.thresholds, {clusters.order.begin(), clusters.order.end()}});
    // Shares in 2^-16 of the buckets, whatever their number will be.
    const std::string rule = base_.get("rule");
    std::vector<double> list(clusters.centres.size(), 200);
    list.front() = list.back() = 500000;
    const double seen = std::max(1.0, histogram.total());
    std::vector<double> counts = clusters.counts;
    for (double& count : counts) count *= 65536 / budget / seen;  // as many elements as 65536 buckets are for
    const std::vector<uint32_t> shares =
        rule == "optimal" ? balance_signs(allocate_hash(counts, clusters.variances, 65536), counts, clusters.variances)
        : rule == "density" ? allocate_paper(clusters, PaperRule::density, 65536)
        : rule == "entropy" ? allocate_paper(clusters, PaperRule::entropy, 65536)
                            : allocate_paper(clusters, PaperRule::list, 65536, list);
    return words_of({clusters.thresholds, shares});
  }
};

}  // namespace

std::unique_ptr<Fitter> casq_fitter(const Codec& codec, const FitContext&) {
  return std::make_unique<ClusterFitter>(codec);
}

}  // namespace gradwire
