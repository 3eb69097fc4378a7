// SPDX-License-Identifier: Apache-2.0
// Units of the codec `fft` on the CPU. They are taken group by group: a group is one unit, or the units of one block
// where chunks are smaller than a block. fft.h says what the words of a unit are.
#pragma once

#include "codec/fft/kernels.h"
#include "codec/unit.h"

namespace gradwire {

inline uint32_t fft_group(const FftScheme& s) { return s.chunk < kBlock ? kBlock : s.chunk; }  // elements
inline uint64_t fft_groups(const FftScheme& s, uint64_t count) { return div_up(count, fft_group(s)); }

// Encodes groups [begin, end) of the span (span.scheme, begin and end are not read) and adds their words to
// `check`.
void encode_fft(const Kernels& kernels, const FftKernels& fft, const FftScheme& scheme, const Span& span,
                uint64_t begin, uint64_t end, Scratch& scratch, LaneSums& check);

// Null if the units of a group can come from an encoder, else the field that cannot: "bitmap", "codes", "padding" or
// "scales".
const char* check_fft(const FftScheme& scheme, const Span& span, uint64_t group);

// Expects units that check_fft() accepts.
void decode_fft(const Kernels& kernels, const FftKernels& fft, const FftScheme& scheme, const Span& span,
                uint64_t begin, uint64_t end, Scratch& scratch);

extern const UnitOps kFftUnits;

}  // namespace gradwire
