// SPDX-License-Identifier: Apache-2.0
// How many bits a step may use (dqsgd). A step whose norm is g_n is quantised with s_n = 2^(B_n - 1) - 1 levels on each
// side of zero, which adds g_n^2 / s_n^2 to the bound of the error. Where old errors are forgotten (convex), this is
// weighted by alpha^(N-n); where all steps count alike (non-convex), it is not.
//
// Error form: the closed form of the paper, s_n = k alpha^((N-n)/2) g_n or s_n = t g_n. k and t follow from the allowed
// quantisation error, and widths are rounded up.
//
// Budget form: widths are whole numbers, so the best ones are found by a price of a bit. A step takes another bit as
// long as the noise that the bit removes is worth more than the price. The price is solved anew at every step such
// that this step and all later ones together are expected to use what is left of the budget; what a step does not use
// goes to the later ones. Rounding the closed form instead is far from the optimum at small widths: a step that goes
// from three bits to two adds ten times the noise that another one loses by going from three to four.
//
// The norms of the future are needed for that. Their logarithm is forecast by a line with a scatter about it. Where the
// fall over the run is told (`fall`), the line has that slope; otherwise it is flat, since the norms of real trainings
// rise, fall and stay, and a forecast of a fall that does not come spends the budget too early. Under the convex rule
// the slope is fitted, shrunk towards the fall without gradient noise, alpha^(1/2) per step. The scatter has a normal
// distribution, so the expected widths of all remaining steps have a closed form whose cost does not depend on N.
//
// Unknown length (steps = 0): there is no last step to save for, so alpha has no say. The price fills a horizon that
// rolls kRollingHorizon steps ahead of the present one, and the mean stays within the budget after every single step.
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
  double fall = 1;       // budget form: the first norm over the last one, where it is known in advance
  bool lagged = false;   // budget form: the norm that decide() is given is that of the step before
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
  struct Forecast {
    double here;    // log2 of the norm of the step that is decided
    double next;    // of the step after it
    double slope;   // per later step
    double spread;  // the standard deviation about this line
  };
  void learn(uint64_t step, double log_norm);
  double slope() const;
  double trend() const;
  Forecast forecast(uint64_t step, double log_norm) const;

  BitRule rule_;
  double memory_;         // what one step leaves of the older norms' weight in the fit
  double scale_ = 0;      // error form: log2 of k or t
  uint64_t spent_ = 0;    // bits per element, summed over steps
  uint64_t told_ = 0;     // calls of spent()
  uint64_t learned_ = 0;  // 1 + the last step whose norm was learned
  double sums_[6] = {};   // weights, x, y, xx, xy, yy; x counts steps from the last one learned, y is log2 of the norm
  double recent_ = 0;     // a short moving average of y
  double scatter_;        // the mean square of what the forecast missed y by
};

}  // namespace gradwire
