// SPDX-License-Identifier: Apache-2.0
// The codec `fft` on a GPU.
#pragma once

#include "codec/cuda_unit.h"

namespace gradwire {

extern const CudaUnitOps kFftCudaUnits;

}  // namespace gradwire
