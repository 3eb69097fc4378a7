// SPDX-License-Identifier: Apache-2.0
// What the CPU drivers offer to the rest of the library: one table of functions per vector target, the reference loop
// among them. All work on a Span, a run of blocks of one tensor (or of one shard of a tensor). A codec whose units need
// more than this has a table of its own in its folder, found by target_table.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/checksum.h"
#include "device/params.h"
#include "device/scheme.h"
#include "gradwire/tensor.h"

namespace gradwire {

struct Span {
  const Scheme* scheme = nullptr;
  uint64_t count = 0;           // elements of the whole piece
  uint64_t begin = 0, end = 0;  // blocks
  DType dtype = DType::f32;
  const void* in = nullptr;  // encode: the piece's values
  void* out = nullptr;       // decode: where they go
  bool add = false;          // decode: add to what is there (f32)
  bool stream = false;       // write large results past the caches

  const void* before = nullptr;  // error feedback, or null
  void* after = nullptr;
  DType residual = DType::f32;
  float loss_scale = 1.0f, unscale = 1.0f;  // of the residual that is added, its decay included; of the new one

  uint64_t key = 0;            // tensor_key()
  uint32_t mask = 0;           // rank_mask()
  uint64_t first_block = 0;    // of the piece in its tensor
  uint32_t* region = nullptr;  // the piece's words in the body (read only when decoding)
  uint64_t region_index = 0;   // of the first of them in the body

  uint64_t elements_of(uint64_t block) const { return min_u64(kBlock, count - block * kBlock); }
};

// Working memory of one thread.
struct Scratch {
  alignas(64) float x[kTile];  // a block, or a whole tile
  alignas(64) uint32_t codes[kTile + 64];
  alignas(64) uint64_t keys[kTile];
};

struct Kernels {
  const char* name;
  // One block's values as f32, with feedback added, to `x`; the rest of the block is zero. Returns where to read them:
  // x, or the input itself where nothing has to be done.
  const float* (*load)(const Span&, uint64_t block, float* x);
  uint32_t (*absmax)(const Span&, Scratch&);                    // bit pattern; >= kInfBits: not finite
  void (*sums)(const Span&, uint32_t absmax, Scratch&, Sums&);  // adds to Sums
  // whole: the parameters of the one unit the span lies in, or null where each block holds whole units.
  void (*encode)(const Span&, const UnitParams* whole, Scratch&, LaneSums&);
  // `whole` as above. Returns whether a code was found that no encoder writes.
  bool (*decode)(const Span&, const UnitParams* whole, Scratch&);
  void (*put)(const Span&, uint64_t block, const float* x);  // values of a block to `out`, as dtype and add say
  void (*put_residual)(const Span&, uint64_t block, const float* x);  // x or, where that is NaN, what was there before
  // Codes, one per word, to where they stand in the message, and back: of a full block, of the last, partial one.
  void (*pack)(int bits, const uint32_t* codes, uint32_t* words);
  void (*unpack)(int bits, const uint32_t* words, uint32_t* codes);
  void (*pack_tail)(const uint32_t* codes, uint64_t n, int bits, uint32_t* words);
  void (*unpack_tail)(const uint32_t* words, uint64_t n, int bits, uint32_t* codes);
  void (*sum_rows)(const uint32_t* words, uint32_t rows, uint64_t first_row,
                   LaneSums&);  // rows of 32 words into a checksum
  // body_sum() of words that start at body index `index`, a multiple of 32.
  uint64_t (*sum_words)(const uint32_t* words, uint64_t count, uint64_t index);
};

// What the body of a scheme says about scales, for units that the runner looks after: the same on every target.
struct ScaleOps {
  void (*make_scales)(const Scheme&, uint32_t absmax, const Sums&, uint64_t n, uint32_t* scales);
  uint64_t (*first_invalid)(const Scheme&, const uint32_t* scales, uint64_t units);  // `units`: none
  UnitParams (*make_params)(const Scheme&, const uint32_t* scales);
};
const ScaleOps& scale_ops(const Scheme& scheme);  // of element bodies

const Kernels& scalar_kernels();
const std::vector<const Kernels*>& vector_kernels();    // that this processor runs, best first
const Kernels& kernels_named(const std::string& simd);  // "" the best, "scalar", or a target's name

}  // namespace gradwire
