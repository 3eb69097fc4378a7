// SPDX-License-Identifier: Apache-2.0
// Which messages have error feedback: one rule for the collectives and for the parameter server.
//
// A residual stays bounded only if the codec takes more out of its input than it adds, as a codec that rounds to the
// nearest value does. The error of an unbiased codec with few bits is larger than its input, so with feedback the
// residual would grow from step to step without bound. So the codec says whether it wants feedback, and a user who
// knows better can say so. Between the two lie codecs of about three bits: unbiased, and with an error that feedback
// keeps bounded. They need none, except where Adam's momentum is exchanged.
#pragma once

#include <string_view>

#include "gradwire/collective.h"

namespace gradwire {

// A lossless codec leaves no residual: memory for one would hold zeros for ever.
bool wants_residual(const Codec& codec, ReduceOptions::Feedback choice);

std::string_view name_of(ReduceOptions::Feedback choice);  // codec, on, off, momentum
// Throws Error{usage, "feedback"}.
ReduceOptions::Feedback parse_feedback(std::string_view name);

// Downwards there is one sender, which by default rounds to nearest (Rules::nearest), so it has feedback unless the
// user wants none at all.
ReduceOptions::Feedback owner_feedback_for(ReduceOptions::Feedback choice);

}  // namespace gradwire
