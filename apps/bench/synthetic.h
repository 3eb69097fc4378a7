// SPDX-License-Identifier: Apache-2.0
// Generated gradients that resemble real ones where it matters for a codec: half of the elements are Gaussian and half
// Laplace (heavy tails), and the scale differs from block to block. Every value is a function of (stream, index), so
// any rank can make any other rank's gradient, and a run can be repeated.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/collective.h"

namespace gradwire::app {

// values[i] = element i of the stream; about 1e-3 in size.
void fill_gradient(std::span<float> values, uint64_t stream, int threads);

// The gradients of `rank` for a list of tensors, back to back: a component that all ranks share plus noise of the
// rank's own with the same variance, so that the mean is worth sending; layers differ in scale by up to 1000.
std::vector<float> worker_gradients(const std::vector<NamedTensor>& tensors, int rank, uint64_t seed);

// ||x - y||^2 / ||x||^2 in double; 0 when both are zero. This is what the project calls "error".
double squared_relative_error(std::span<const float> exact, std::span<const float> approximate);

}  // namespace gradwire::app
