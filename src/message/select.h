// SPDX-License-Identifier: Apache-2.0
// Units of which only the strongest values travel (Body::select), on the CPU. Tiles are chosen by the vector kernels;
// whole tensors by a radix count over the magnitudes, in three passes, without further memory.
//
// In a message a unit is k values (f32) in the order of their indices, then the k indices. A unit that holds Inf or NaN
// is the marker followed by zeros, at indices 0..k-1.
#pragma once

#include "device/kernels.h"

namespace gradwire {

// Encodes unit number `unit` of the span's piece (span.begin and end are ignored) and adds its words to `check`.
void encode_selected(const Kernels& kernels, Span span, uint64_t unit, Scratch& scratch, LaneSums& check);

// Null if the unit is honest, else the field that lies ("values" or "indices").
const char* check_selected(const Span& span, uint64_t unit);

// Expects a unit that check_selected() accepts.
void decode_selected(const Kernels& kernels, Span span, uint64_t unit, Scratch& scratch);

}  // namespace gradwire
