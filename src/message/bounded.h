// SPDX-License-Identifier: Apache-2.0
// Which tensors of a message are finite by what its scales say. A unit's values are no larger than its scale, so a
// look at the scales, one for hundreds of values, spares the pass over the decoded values that would find a NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/plan.h"

namespace gradwire {

// Clears `bounded[i]` unless every value of tensor i is known to lie within 2^96. The sum of as many messages as there
// can be ranks is finite then too. Codecs without scales, with a range of their own or with units of their own prove
// nothing. Where some bound is still set, `message` lies on the host and has been decoded, so its head fits the plan.
void keep_bounded(const Plan& plan, std::span<const std::byte> message, std::vector<uint8_t>& bounded);

}  // namespace gradwire
