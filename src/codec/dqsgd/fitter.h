// SPDX-License-Identifier: Apache-2.0
// What decides the width of dqsgd's steps.
#pragma once

#include "codec/fitter.h"

namespace gradwire {

std::unique_ptr<Fitter> dqsgd_fitter(const Codec& codec, const FitContext& context);

}  // namespace gradwire
