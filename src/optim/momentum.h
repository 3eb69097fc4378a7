// SPDX-License-Identifier: Apache-2.0
// SGD with momentum, Adam and AdamW for workers that exchange momenta in place of gradients (docs/algorithms.md). The
// exchange may be compressed, and may keep residuals: they are kept behind the preconditioner, in units of the update.
//
//   g       factor * this worker's gradient, clipped by its caller, plus weight_decay * w where the decay is in it
//   den     sqrt(v) / sqrt(1 - beta2^p) + epsilon                     p: steps at the last pooling
//   send    u = (beta1 m + (1 - beta1) g) / den, |u| at most kLargestUpdate (1 - beta1^k)
//   mean    of u over all workers, as compression leaves it
//   m    <- c * mean * den                                            c clips m by its norm
//   w    <- keep * w - rate / (1 - beta1^k) * m / den                 k counts steps from 1
//
// m, v and w are alike on all workers. With error feedback a coordinate is sent rarely, and then as the sum of many
// steps. Adam's second moment would take such a sum for a large gradient and shrink the step. So v does not see what
// was exchanged. Every worker follows its own gradients, and now and then v becomes the mean over workers of
//
//   q    <- rho q + (1 - rho) g                                       rho = (W - 1) / (W + 1)
//   s    <- beta2 s + (1 - beta2) (q / (1 - rho^j))^2                 j counts the updates of q from 1
//
// The average q over time has the variance of an average over W workers, so s is, in the mean, what Adam would have
// found from averaged gradients.
//
// SGD has neither v nor den: u = momentum m + g.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/runner.h"
#include "optim/adam.h"
#include "optim/elementwise.h"

namespace gradwire {

struct MomentumOptions {
  AdamOptions adam;       // weight_decay is SGD's too
  bool adaptive = true;   // false: SGD
  double momentum = 0.9;  // of SGD
  int world = 1;          // workers
};

// A coordinate whose gradient wakes up between two poolings has a v that is too small by far.
inline constexpr float kLargestUpdate = 10;

// The steps of one worker. Its caller owns the arrays, makes the exchange, and decides whether a step is taken:
//
//   if (optimizer.exact()) { values = exact mean of gradients; optimizer.exact_step(...); }
//   else { optimizer.propose(...); values = compressed mean of values; optimizer.to_momenta(); optimizer.step(...); }
//   if (optimizer.pools()) { second = mean of own_second; optimizer.pooled(...); }
//
// A step whose values are not finite is left out: none of step(), exact_step() and pooled() is called, and nothing has
// changed. On a GPU all calls but pooled() only enqueue.
class MomentumOptimizer {
 public:
  // The arrays of a parameter, on the device. SGD has only the first three.
  struct Arrays {
    float *weights, *values, *first;
    float *second, *own_first, *own_second;
    uint64_t count;
  };
  struct Counts {
    uint64_t taken = 0;   // steps
    uint64_t pooled = 0;  // steps that were taken at the last pooling
    uint64_t next = 1;    // steps that will be taken at the next one
  };

  MomentumOptimizer(std::vector<Arrays> parameters, const MomentumOptions& options, const Device& device);

  // Adam's first step needs second moments, so it averages gradients in full precision.
  bool exact() const { return options_.adaptive && counts.taken == 0; }
  void exact_step(std::span<const float* const> gradients, double factor, double rate, double mean_factor);

  // Writes the values of some parameters, whose gradients are given in that order.
  void propose(std::span<const size_t> some, std::span<const float* const> gradients, double factor);
  void propose(std::span<const float* const> gradients, double factor) { propose(all_, gradients, factor); }
  void to_momenta();  // of the values, which are mean updates
  void step(std::span<const float* const> gradients, double factor, double rate, double clip);

  // This worker's own moments, without a step. step() and exact_step() do it by themselves.
  void follow(std::span<const float* const> gradients, double factor);

  bool pools() const { return options_.adaptive && counts.taken == counts.next; }
  // A coordinate that was never used has a second moment of zero, and would take a huge step when it wakes up. So no
  // second moment of a parameter is less than a ten-thousandth of their mean. `host` has the values that were pooled,
  // on the host, and gets those to be used.
  static void lift(std::span<float> host);
  void pooled();

  Counts counts;  // kept with a run, as the arrays are

 private:
  enum class Use { proposal, momenta, step, follow };
  std::vector<OptimizerSpan> spans(Use use, std::span<const size_t> some,
                                   std::span<const float* const> gradients) const;
  std::vector<Arrays> parameters_;
  std::vector<size_t> all_;
  MomentumOptions options_;
  Elementwise elementwise_;
};

// When second moments that are pooled after k steps are pooled next. Distances grow with the age of the run, because
// second moments change less and less: by a quarter of it, up to 64 steps.
uint64_t next_pooling(uint64_t k);

}  // namespace gradwire
