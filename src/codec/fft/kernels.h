// SPDX-License-Identifier: Apache-2.0
// The codec `fft` on one CPU thread, one unit at a time: a table of functions per vector target, as in
// device/kernels.h.
#pragma once

#include <cstdint>

#include "codec/fft/fft.h"
#include "device/kernels.h"

namespace gradwire {

// Working memory of one thread, cut out of its Scratch. What encode_fft() and decode_fft() load lies in front.
struct FftWork {
  static constexpr uint32_t kReals = kFftMostChunk + 64, kBins = kFftMostChunk / 2 + 80;
  float *x, *y;    // a group of units, as it comes, and as it is decoded or what is left of it
  float *re, *im;  // bins, or the complex numbers under way
  float *re1, *im1;
  float* weight;
  float* pairs;  // parts of kept bins
  uint32_t* codes;

  explicit FftWork(Scratch& s) {
    float* at = s.x;
    const auto take = [&](uint32_t n) {
      float* part = at;
      at += n;
      return part;
    };
    x = take(kReals);
    y = take(kReals);
    re = take(kBins);
    im = take(kBins);
    re1 = take(kBins);
    im1 = take(kBins);
    weight = take(kBins);
    pairs = take(kReals);
    codes = s.codes;
  }
};
static_assert(3 * FftWork::kReals + 5 * FftWork::kBins <= kTile);

struct FftKernels {
  const char* name;
  // Values times pre times grid to doubled bins: work.re, work.im. `size` values.
  void (*forward)(const float* x, uint32_t size, float pre, float grid, const FftWork&);
  // work.re, work.im, relative to the scale, to values. Overwrites re, im, re1, im1.
  void (*inverse)(uint32_t size, float scale, float* out, const FftWork&);
  // One unit of `size` values, zeros behind the tensor's end. `rest`, where not null, gets what is left for error
  // feedback: (x - decoded) * unscale, or NaN if the unit was marked; it may be x. `memory`, 0 at first, goes from unit
  // to unit and only saves time.
  void (*encode)(const FftScheme&, const RangeFloat&, const float* x, uint32_t size, uint32_t* words, float* rest,
                 float unscale, uint32_t& memory, const FftWork&);
  void (*decode)(const FftScheme&, const RangeFloat&, const uint32_t* words, uint32_t size, float* out, const FftWork&);
};

const FftKernels& fft_kernels(const Kernels& kernels);  // of the same target

}  // namespace gradwire
