// SPDX-License-Identifier: Apache-2.0
// topk's choice among the values of a tile on one CPU thread: a table of functions per vector target. lanes-inl.h is
// their body.
#pragma once

#include <cstdint>

#include "device/kernels.h"

namespace gradwire {

struct TopkKernels {
  const char* name;
  // The k strongest of `elements` values x, the lowest index first among equals: writes their indices, in order.
  void (*select)(const float* x, uint32_t elements, uint32_t k, uint32_t* indices, Scratch&);
};

const TopkKernels& topk_kernels(const Kernels& kernels);  // of the same target

}  // namespace gradwire
