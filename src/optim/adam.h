// SPDX-License-Identifier: Apache-2.0
// SGD with momentum, Adam and AdamW: the rules of torch.optim, as element rules with the same bits on every device.
//
//   g     factor * gradient, plus weight_decay * w where the decay is part of the gradient (SGD, Adam)
//   SGD   b <- momentum b + g           w <- w - rate b          (without momentum: w <- w - rate g)
//   Adam  m <- beta1 m + (1 - beta1) g
//         v <- beta2 v + (1 - beta2) g^2
//         w <- w - rate / (1 - beta1^k) * m / (sqrt(v / (1 - beta2^k)) + epsilon)
//   AdamW multiplies w by 1 - rate * weight_decay first, and does not add the decay to the gradient.
//
// k counts steps from 1. `factor` undoes the loss scale and clips.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/bits.h"
#include "optim/elementwise.h"

namespace gradwire {

struct SgdOptions {
  double momentum = 0, weight_decay = 0;
};

struct AdamOptions {
  double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0;
  bool decoupled = false;  // AdamW: the decay acts on the weights alone
};

// `first` is the momentum's array, `out` the weights.
template <bool kMomentum>
struct SgdRule {
  float factor, weight_decay, momentum, rate;

  GW_HD void operator()(const OptimizerSpan& s, uint64_t i) const {
    const float w = s.out[i];
    float g = factor * s.gradient[i] + weight_decay * w;
    if constexpr (kMomentum) {
      g = momentum * s.first[i] + g;
      s.first[i] = g;
    }
    s.out[i] = w - rate * g;
  }
};

// `first` and `second` are the moments, `out` the weights.
struct AdamRule {
  float factor;
  float keep, weight_decay;   // what the weights are multiplied by; what of them is added to the gradient
  float beta1, fresh1;        // of the first moment: what stays, what comes
  float beta2, fresh2;        // of the second moment
  float rate, root, epsilon;  // the rate and the root of the second moment's correction

  GW_HD void operator()(const OptimizerSpan& s, uint64_t i) const {
    const float w = s.out[i] * keep;
    const float g = factor * s.gradient[i] + weight_decay * w;
    const float m = beta1 * s.first[i] + fresh1 * g;
    const float v = beta2 * s.second[i] + fresh2 * (g * g);
    s.first[i] = m;
    s.second[i] = v;
    s.out[i] = w - rate * (m / (sqrtf(v) / root + epsilon));
  }
};

// The step number `k`, from 1, with this learning rate. The numbers are computed in double and rounded once.
AdamRule adam_rule(const AdamOptions& options, uint64_t k, double rate, double factor);

void sgd_step(const Elementwise& device, std::span<const OptimizerSpan> spans, const SgdOptions& options, double rate,
              double factor);
void adam_step(const Elementwise& device, std::span<const OptimizerSpan> spans, const AdamOptions& options, uint64_t k,
               double rate, double factor);

}  // namespace gradwire
