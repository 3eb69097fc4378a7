// SPDX-License-Identifier: Apache-2.0
// topk's units on the CPU.
#pragma once

#include "codec/unit.h"

namespace gradwire {

extern const UnitOps kTopkUnits;

}  // namespace gradwire
