// SPDX-License-Identifier: Apache-2.0
// The element rules of momentum.h, which explains them.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "core/bits.h"
#include "optim/elementwise.h"
#include "optim/momentum.h"

namespace gradwire {

struct OwnGradient {
  float factor, weight_decay;
  GW_HD float at(const OptimizerSpan& s, uint64_t i) const {
    return factor * s.gradient[i] + weight_decay * s.shared[i];
  }
};

struct Denominator {
  float root, epsilon;
  GW_HD float of(float second) const { return sqrtf(second) / root + epsilon; }
};

template <bool kAdaptive>
struct ProposalRule {
  OwnGradient own;
  float keep, fresh, limit;
  Denominator below;

  GW_HD void operator()(const OptimizerSpan& s, uint64_t i) const {
    float u = keep * s.first[i] + fresh * own.at(s, i);
    if constexpr (kAdaptive) {
      u = u / below.of(s.second[i]);
      // What is not finite stays so: all workers must see it.
      const float size = fabsf(u);
      const float limited = u > 0 ? limit : -limit;
      u = size > limit && size <= FLT_MAX ? limited : u;
    }
    s.out[i] = u;
  }
};

struct MeanMomentumRule {
  Denominator below;
  GW_HD void operator()(const OptimizerSpan& s, uint64_t i) const { s.out[i] = s.out[i] * below.of(s.second[i]); }
};

template <bool kAdaptive>
struct MomentumStepRule {
  float clip, keep, rate;
  Denominator below;

  GW_HD void operator()(const OptimizerSpan& s, uint64_t i) const {
    const float m = clip * s.gradient[i];
    s.first[i] = m;
    s.out[i] = s.out[i] * keep - rate * (kAdaptive ? m / below.of(s.second[i]) : m);
  }
};

struct OwnMomentsRule {
  OwnGradient own;
  float rho, fresh, correct;
  float beta2, fresh2;

  GW_HD void operator()(const OptimizerSpan& s, uint64_t i) const {
    const float q = rho * s.first[i] + fresh * own.at(s, i);
    const float h = q * correct;
    s.first[i] = q;
    s.second[i] = beta2 * s.second[i] + fresh2 * (h * h);
  }
};

}  // namespace gradwire
