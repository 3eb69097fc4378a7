// SPDX-License-Identifier: Apache-2.0
// The codec `casq` on a GPU.
#pragma once

#include "codec/cuda_unit.h"

namespace gradwire {

extern const CudaUnitOps kCasqCudaUnits;

}  // namespace gradwire
