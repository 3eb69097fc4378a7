// SPDX-License-Identifier: Apache-2.0
// What the codecs with units of their own (unit.h) share on the CPU: the blocks of a unit as values and as residuals,
// and a run of words into the checksum.
#pragma once

#include <algorithm>
#include <cstring>

#include "device/kernels.h"

namespace gradwire {

// Loads the blocks [begin, end) as f32, feedback added, one after another into `x`. Behind the end of the tensor there
// are zeros up to the end of a block.
inline void load_blocks(const Kernels& kernels, const Span& s, uint64_t begin, uint64_t end, float* x) {
  for (uint64_t block = begin; block < end; ++block, x += kBlock) {
    const float* values = kernels.load(s, block, x);
    if (values != x) std::memcpy(x, values, kBlock * sizeof(float));
  }
}

// For a unit that was marked: with feedback, its blocks [s.begin, s.end) keep their residuals.
inline void keep_residuals(const Kernels& kernels, const Span& s) {
  if (!s.before) return;
  alignas(64) float marked[kBlock];
  std::fill(marked, marked + kBlock, bits_float(kMarker));
  for (uint64_t block = s.begin; block < s.end; ++block) kernels.put_residual(s, block, marked);
}

// Adds `count` words that begin at body index `index`. Whole rows of the checksum go through the vector kernel.
inline void add_words(const Kernels& kernels, const uint32_t* words, uint64_t count, uint64_t index, LaneSums& check) {
  uint64_t i = 0;
  for (; i < count && (index + i) % kLane; ++i) check.add_word(words[i], index + i);
  const uint64_t rows = (count - i) / kLane;
  kernels.sum_rows(words + i, static_cast<uint32_t>(rows), (index + i) / kLane, check);
  for (i += rows * kLane; i < count; ++i) check.add_word(words[i], index + i);
}

}  // namespace gradwire
