// SPDX-License-Identifier: Apache-2.0
// What is done to f32 sums once they are complete: divided into means, rounded to the two 16-bit types. Each is one
// IEEE operation or integer arithmetic, so every device gives the same bits. On a GPU the calls only enqueue, on the
// Device's stream, and also see to not-a-numbers: arithmetic on a GPU makes 0x7fffffff of them, where a processor keeps
// the marker that came in.
#pragma once

#include <cstdint>
#include <span>

#include "gradwire/runner.h"
#include "gradwire/tensor.h"

namespace gradwire {

struct SumSpan {
  float* data;
  uint64_t count;
};

struct NarrowSpan {
  const float* from;
  void* to;
  uint64_t count;
  DType dtype;  // f16 or bf16
};

void divide(const Device& device, std::span<const SumSpan> sums, float divisor);
void narrow(const Device& device, std::span<const NarrowSpan> spans);
// Every NaN becomes the one that a CPU would have; on a CPU they are that already.
void settle_nans(const Device& device, std::span<const SumSpan> values);

// cuda_sums.cu
void cuda_divide(int index, void* stream, std::span<const SumSpan> sums, float divisor);
void cuda_narrow(int index, void* stream, std::span<const NarrowSpan> spans);

}  // namespace gradwire
