// SPDX-License-Identifier: Apache-2.0
// The table of the body in levels-inl.h: levels of a norm, ascending within [-1, 1], and slopes of the rounding between
// them.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "device/scheme.h"

namespace gradwire {

// Puts levels into a scheme of Body::levels (at most 2^bits of them) and the table into `floats`. kappa: the dead zone
// at both ends of a cell, as a share of it; values within go to the nearer level, and those between at random.
void set_levels(std::span<const float> levels, double kappa, Scheme& scheme, std::vector<float>& floats);

std::vector<std::string> describe_levels(std::span<const float> levels, bool fitted);

}  // namespace gradwire
