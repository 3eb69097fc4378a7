// SPDX-License-Identifier: Apache-2.0
// The levels of a scalar quantizer, fitted to what is known of the data: of all sets of 2^bits levels in [-1, 1], the
// one with the least expected squared error. Nothing forces the levels of the two signs to be alike. A set that is
// symmetric either has no zero, which gradients with many exact zeros cannot afford, or leaves a code unused.
//
// A dynamic programme over the histogram's edges finds the best set there (level_programme.h says what is guaranteed).
// A local search then moves single levels off the edges, and only ever lowers the error.
#pragma once

#include <vector>

#include "codec/optquant/level_model.h"

namespace gradwire {

struct LevelFit {
  std::vector<float> levels;  // 2^bits, ascending by at least 2^-21, within [-1, 1]
  double error = 0;           // what an element costs in the mean, in units of (largest magnitude)^2
};

// bits 2..8. With no weight at all: even levels, error 0. The same counts give the same levels on every rank. A kappa
// above 0.4995 is fitted as 1/2.
LevelFit fit_levels(const LevelHistogram& histogram, int bits, const LevelRule& rule);

}  // namespace gradwire
