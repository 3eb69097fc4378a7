// SPDX-License-Identifier: Apache-2.0
// What learns the levels of optquant.
#pragma once

#include "codec/fitter.h"

namespace gradwire {

std::unique_ptr<Fitter> optquant_fitter(const Codec& codec, const FitContext& context);

}  // namespace gradwire
