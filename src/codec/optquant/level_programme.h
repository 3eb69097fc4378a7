// SPDX-License-Identifier: Apache-2.0
// The dynamic programme that finds levels on the edges of a model's bins. What is guaranteed, in the model and up to
// rounding in double:
//  - unbiased: no set of levels on edges is better.
//  - biased, kappa = 1/2 (nearest): no set of intervals that end on edges is better, each with its own mean as level.
//  - biased, 0 <= kappa < 1/2: no set of levels on every `stride`-th edge (and the last) is better. This cost need not
//    be Monge, so the programme is the plain one on fewer candidates.
#pragma once

#include <vector>

#include "codec/optquant/level_model.h"

namespace gradwire {

// `count` ascending levels, at least 2. The model has more bins (divided by stride) than that, and some weight.
std::vector<double> best_levels(const LevelModel& model, size_t count, bool biased, size_t stride = 1);

}  // namespace gradwire
