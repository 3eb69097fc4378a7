// SPDX-License-Identifier: Apache-2.0
// casq's passes over a tile on one CPU thread: a table of functions per vector target. lanes-inl.h is their body.
#pragma once

#include <cstdint>

#include "device/kernels.h"

namespace gradwire {

struct CasqKernels {
  const char* name;
  // The number of ascending thresholds at or below each of n values; n is a multiple of 32.
  void (*classify)(const float* x, uint64_t n, const float* thresholds, uint32_t count, uint32_t* codes);
  // A tile with 2^bits clusters. n is a multiple of 32, and every array but `codes` has room for 16 more elements.
  // split() classifies, and appends each value to the list of its cluster, whose end moves on.
  void (*split)(int bits, const float* x, uint64_t n, const float* thresholds, uint32_t* codes, float** lists);
  // merge() takes each value from the list of its cluster, whose begin moves on. With `stream`, `out` is at a multiple
  // of 64 bytes and is written past the caches.
  void (*merge)(int bits, const uint32_t* codes, uint64_t n, const float** lists, float* out, bool stream);
  void (*count)(int bits, const uint32_t* codes, uint64_t n, uint32_t* counts);  // codes of each cluster; any n
  // Any n: values to integers on a grid; means to f16 as they travel, and back, in units of `step`.
  void (*round)(const float* x, uint64_t n, Grid grid, float scale, int32_t* out);
  void (*narrow_means)(const float* x, uint64_t n, uint16_t* out);
  void (*widen_means)(const uint16_t* means, uint64_t n, float step, float* out);
};

const CasqKernels& casq_kernels(const Kernels& kernels);  // of the same target

}  // namespace gradwire
