// SPDX-License-Identifier: Apache-2.0
// How many bits a step may use (dqsgd). A step whose norm is g_n is quantised with s_n = 2^(B_n - 1) - 1 levels a side,
// and the rule says how fine: s_n = k alpha^((N-n)/2) g_n where old errors are forgotten (convex), s_n = t g_n where
// all steps count alike (non-convex).
//
// Error form: k and t follow from the allowed quantisation error, widths are rounded up. Budget form: k (or t) is
// solved anew at every step so that the clamped widths of all remaining steps fill what is left of the budget, and what
// a step did not use goes to the later ones. That needs the norms of the future. A level alone (a moving average) would
// make the non-convex rule fixed bits and, where norms fall without noise, the convex rule miserly at first. So the log
// norm is forecast by a line, fitted with forgetting and shrunk towards a prior: convex, the fall without gradient
// noise, alpha^(1/2) a step, which makes fixed bits (the optimum there) the start; non-convex, a twentyfold fall over
// the run, since a few steps that are too fine cost little and one that is too coarse while norms are large costs much.
// With a line both rules have exponents linear in the step, so the sum over the remaining steps is two clamped
// stretches and one smooth integral: its cost does not depend on N.
//
// Unknown length (steps = 0): there is no last step to save for, so alpha has no say; t fills a horizon that rolls
// kRollingHorizon steps ahead of the present one, and the mean stays within the budget after every single step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace gradwire {

struct BitRule {
  enum class Form { budget, error };
  Form form = Form::budget;
  bool convex = false;
  double budget = 4;     // budget form: mean bits per element over the run
  double error = 0;      // error form: the quantisation term that is allowed, eps_Q
  uint64_t steps = 0;    // N; 0: unknown (not for the convex error form)
  double alpha = 1;      // convex: what a step leaves of an old error, in (0, 1]
  double eta = 0;        // error form: the learning rate ...
  double smooth = 1;     // ... L, with L eta < 2 ...
  double dimension = 1;  // ... elements ...
  double workers = 1;    // ... and workers, whose rounding is independent
  int least = 2, most = 16;
};

class BitController {
 public:
  static constexpr uint64_t kRollingHorizon = 1024;

  explicit BitController(const BitRule& rule);  // throws Error (usage) where a field makes no sense

  // The width of step `step`: least..most, or 0 for a zero norm. `norm` is the pooled norm known when deciding. A step
  // may be decided again; its norm is learned once.
  int decide(uint64_t step, double norm);

  // What the step really used, 0 included. Only a width beyond the decided one can overspend the budget.
  void spent(int bits);
  double mean_bits() const;  // per step told to spent()

  std::vector<uint64_t> save() const;
  void restore(std::span<const uint64_t> state);  // throws Error (frame) unless it came from save()

 private:
  void learn(uint64_t step, double log_norm);
  double slope() const;

  BitRule rule_;
  double memory_;         // what one step leaves of the older norms' weight in the fit
  double scale_ = 0;      // error form: log2 of k or t
  uint64_t spent_ = 0;    // bits per element, summed over steps
  uint64_t told_ = 0;     // calls of spent()
  uint64_t learned_ = 0;  // 1 + the last step whose norm was learned
  double sums_[6] = {};   // weights, x, y, xx, xy, yy; x counts steps from the last one learned, y is log2 of the norm
};

}  // namespace gradwire
