// SPDX-License-Identifier: Apache-2.0
// What learns the mantissa of fft's parts, and follows the schedule of theta.
#pragma once

#include "codec/fitter.h"

namespace gradwire {

std::unique_ptr<Fitter> fft_fitter(const Codec& codec, const FitContext& context);

}  // namespace gradwire
