// SPDX-License-Identifier: Apache-2.0
// The sums of a GPU. Division is IEEE's, whatever the compiler was told about speed; rounding is the integer arithmetic
// of core/bits.h.
#include "core/bits.h"
#include "device/cuda_packs.cuh"
#include "device/sums.h"

namespace gradwire {
namespace {

__global__ void divide_kernel(const __grid_constant__ Pack<SumSpan> pack, float divisor) {
  const auto [sum, at, step] = pack.turn();
  for (uint64_t i = at; i < sum.count; i += step) {
    const uint32_t before = float_bits(sum.data[i]);
    uint32_t after = kMarker;
    if ((before & 0x7fffffffu) <= kInfBits) after = float_bits(__fdiv_rn(bits_float(before), divisor));
    if (after != before) sum.data[i] = bits_float(after);
  }
}

__global__ void narrow_kernel(const __grid_constant__ Pack<NarrowSpan> pack) {
  const auto [s, at, step] = pack.turn();
  const float* from = s.from;
  auto* to = static_cast<uint16_t*>(s.to);
  const bool half = s.dtype == DType::f16;
  for (uint64_t i = at; i < s.count; i += step) to[i] = half ? f32_to_f16(from[i]) : f32_to_bf16(from[i]);
}

}  // namespace

void cuda_divide(int index, void* stream, std::span<const SumSpan> sums, float divisor) {
  in_packs(index, sums, 1, [&](const Pack<SumSpan>& pack, unsigned blocks) {
    enqueue<divide_kernel>(blocks, kPackThreads, 0, static_cast<cudaStream_t>(stream), pack, divisor);
  });
}

void cuda_narrow(int index, void* stream, std::span<const NarrowSpan> spans) {
  in_packs(index, spans, 1, [&](const Pack<NarrowSpan>& pack, unsigned blocks) {
    enqueue<narrow_kernel>(blocks, kPackThreads, 0, static_cast<cudaStream_t>(stream), pack);
  });
}

}  // namespace gradwire
