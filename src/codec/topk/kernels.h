// SPDX-License-Identifier: Apache-2.0
// topk's choice among the values of a tile, and the levels of what it chose, on one CPU thread: a table of functions
// per vector target. lanes-inl.h and levels-inl.h are their bodies.
#pragma once

#include <cstdint>

#include "device/kernels.h"

namespace gradwire {

struct TopkKernels {
  const char* name;
  // The k strongest of `elements` values x, the lowest index first among equals: writes their indices, in order.
  void (*select)(const float* x, uint32_t elements, uint32_t k, uint32_t* indices, Scratch&);
  // bits=1 to 8: fits levels to the k values x[indices[j]], of which `absmax` is the largest magnitude, and writes the
  // scales that say them and a code for each value. `work` and `codes` have room for k, rounded up to a whole vector.
  void (*level_codes)(const float* x, const uint32_t* indices, uint32_t k, uint32_t bits, uint32_t absmax,
                      uint32_t* scales, float* work, uint32_t* codes);
};

const TopkKernels& topk_kernels(const Kernels& kernels);  // of the same target

}  // namespace gradwire
