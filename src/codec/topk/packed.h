// SPDX-License-Identifier: Apache-2.0
// Packed units of topk on the CPU.
#pragma once

#include "codec/topk/packed_unit.h"
#include "codec/topk/places.h"
#include "device/kernels.h"

namespace gradwire {

// Writes the values x[indices[j]] and their places, and to sent[j] what a decoder will make of them. `absmax` is the
// largest magnitude of the unit, which is finite. `sent` has kTile floats, and codes as many words to work in.
void encode_packed(const Kernels& kernels, const PackedUnit& u, const float* x, uint32_t absmax,
                   const uint32_t* indices, float* sent, uint32_t* codes);
void encode_packed_marked(const PackedUnit& u, uint32_t* indices);  // `indices` has room for k

const char* packed_problem(const PackedUnit& u);  // the field that no encoder writes, or null

// Of a unit without a problem. True where it is marked; else values and indices of what was kept.
bool decode_packed(const Kernels& kernels, const PackedUnit& u, float* values, uint32_t* indices);

}  // namespace gradwire
