// SPDX-License-Identifier: Apache-2.0
// A second way to average messages, for codecs whose tables say how many elements stand behind each value (UnitOps in
// codec/unit.h). The tables of the senders are averaged bucket by bucket, weighted by these counts, and every element
// takes the mean over the senders of its bucket there. Tables are small, so that their sum may be all-reduced, and a
// receiver looks up one table instead of W. The price is an error where senders differ; decoding each message and
// averaging the results is exact.
#pragma once

#include <cstddef>
#include <span>

#include "gradwire/plan.h"

namespace gradwire {

bool can_merge(const Plan& plan);  // every tensor is of a codec whose tables can be merged

// out[i] gets the mean of tensor i, as f32. An element that any sender marked as not a number becomes NaN. Throws
// Error{frame} naming the field for a message that is not one of this plan, and Error{usage} for a plan that cannot be
// merged.
void decode_merged(const Plan& plan, std::span<const std::span<const std::byte>> messages, std::span<float* const> out);

}  // namespace gradwire
