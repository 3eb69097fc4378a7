// SPDX-License-Identifier: Apache-2.0
#include "codec/dqsgd/fitter.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "codec/define.h"
#include "codec/dqsgd/budget.h"
#include "codec/refit.h"
#include "core/bits.h"
#include "device/scheme.h"

namespace gradwire {
namespace {

// What drives the rounding noise of a step is the mean over its elements of the squared norm of their bucket.
class WidthFitter final : public Fitter {
 public:
  WidthFitter(const Codec& codec, const FitContext& context)
      : base_(codec), rule_(rule_of(codec, context)), controller_(rule_) {
    set(scheme_of(base_).bits);
  }
  Source source() const override { return Source::scales; }
  bool due(uint64_t) const override { return true; }
  bool ahead() const override { return base_.get("mode") == "paper"; }
  size_t counts() const override { return 1; }  // sum of elements * norm^2
  // Before a step was seen, nothing may be sent as zeros: its norms could not be read from the message.
  Codec codec(uint64_t step, double) const override {
    return ahead() && bits_ == 0 && decided_ != step ? width(rule_.least) : current_;
  }
  void observe_scales(std::span<const uint32_t> scales, std::span<const uint32_t> elements,
                      FitStats& stats) const override {
    double sum = 0;
    bool any = false;
    for (size_t u = 0; u < scales.size(); ++u) {
      const double norm = bits_float(scales[u]);
      if (scales[u] >= kInfBits) continue;
      sum += norm * norm * elements[u];
      any = true;
    }
    if (!any) return;
    const int64_t exponent = sum > 0 ? std::ilogb(sum) - 40 : -400;
    stats.add({exponent, {sum > 0 ? std::llround(std::ldexp(sum, -static_cast<int>(exponent))) : 0}});
  }
  void learn(uint64_t step, const FitStats& pooled) override {
    if (!ahead()) controller_.spent(bits_);
    if (pooled.exponent != FitStats::kNone) {
      const double mean = std::ldexp(static_cast<double>(pooled.counts[0]), static_cast<int>(pooled.exponent)) /
                          (rule_.dimension * rule_.workers),
                   norm = std::sqrt(mean);
      const int bits = controller_.decide(ahead() ? step : step + 1, norm);
      // Nothing is sent only where this very step is known to be zero.
      set(bits > 0 || ahead() ? bits : rule_.least);
      decided_ = step;
    }
    if (ahead()) controller_.spent(bits_);
  }
  std::string plan() const override {
    if (rule_.form == BitRule::Form::error)
      return fmt::format("a quantisation error of {} over {}", rule_.error, length());
    return fmt::format("{} bits per element on average over {}; {:.4g} so far, {} in the next step", rule_.budget,
                       length(), controller_.mean_bits(), bits_);
  }
  std::vector<uint64_t> save() const override {
    std::vector<uint64_t> state = controller_.save();
    state.push_back(static_cast<uint64_t>(bits_));
    return state;
  }
  void restore(std::span<const uint64_t> state) override {
    if (state.empty() || (state.back() != 0 && (state.back() < static_cast<uint64_t>(rule_.least) ||
                                                state.back() > static_cast<uint64_t>(rule_.most))))
      refuse_state(base_, "has no number of bits that is allowed");
    controller_.restore(state.first(state.size() - 1));
    set(static_cast<int>(state.back()));
  }

 private:
  static BitRule rule_of(const Codec& codec, const FitContext& context) {
    BitRule rule;
    rule.error = context.share * number_of(codec, "error");
    rule.form = rule.error > 0 ? BitRule::Form::error : BitRule::Form::budget;
    rule.convex = codec.get("rule") == "convex";
    rule.steps = static_cast<uint64_t>(number_of(codec, "steps"));
    if (rule.steps == 0) rule.steps = context.steps;
    rule.alpha = number_of(codec, "alpha");
    rule.fall = number_of(codec, "fall");
    rule.lagged = codec.get("mode") != "paper";
    rule.eta = number_of(codec, "eta");
    rule.smooth = number_of(codec, "smooth");
    rule.dimension = static_cast<double>(std::max<uint64_t>(context.elements, 1));
    rule.workers = context.world;
    rule.least = static_cast<int>(number_of(codec, "min"));
    rule.most = static_cast<int>(number_of(codec, "max"));
    rule.budget = std::clamp<double>(number_of(codec, "budget"), rule.least,
                                     rule.most);  // what no width can keep is brought to one that can
    return rule;
  }
  std::string length() const { return rule_.steps ? fmt::format("{} steps", rule_.steps) : "a run of unknown length"; }
  void set(int bits) {
    bits_ = bits;
    current_ = width(bits);
  }
  Codec width(int bits) const { return base_.fitted(std::vector<uint32_t>{static_cast<uint32_t>(bits)}); }

  Codec base_, current_;
  BitRule rule_;
  BitController controller_;
  int bits_ = 0;
  uint64_t decided_ = UINT64_MAX;  // the step that bits_ was decided in
};

}  // namespace

std::unique_ptr<Fitter> dqsgd_fitter(const Codec& codec, const FitContext& context) {
  return std::make_unique<WidthFitter>(codec, context);
}

}  // namespace gradwire
