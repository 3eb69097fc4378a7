// SPDX-License-Identifier: Apache-2.0
// What learns the clusters of casq.
#pragma once

#include "codec/fitter.h"

namespace gradwire {

std::unique_ptr<Fitter> casq_fitter(const Codec& codec, const FitContext& context);

}  // namespace gradwire
