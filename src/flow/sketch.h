// SPDX-License-Identifier: Apache-2.0
// casq's units on the CPU: clusters, buckets, tables. device/sketch.h has the layout and the rules.
#pragma once

#include <span>

#include "device/kernels.h"

namespace gradwire {

// One unit (number `unit` of the piece); `hash_memory` holds sums and counts of mode=paper and grows as needed.
struct SketchMemory {
  std::vector<int64_t> sums;
  std::vector<uint32_t> counts;
  std::vector<float> means;
};
void encode_sketch(const Kernels& kernels, Span s, uint64_t unit, Scratch& scratch, SketchMemory& memory, LaneSums& check);
const char* check_sketch(const Span& s, uint64_t unit);  // the field that is wrong, or null
void decode_sketch(const Kernels& kernels, Span s, uint64_t unit, Scratch& scratch, SketchMemory& memory);

}  // namespace gradwire
