// SPDX-License-Identifier: Apache-2.0
#include "core/bits.h"
#include "device/cuda_packs.cuh"
#include "device/finite_check.h"

namespace gradwire {
namespace {

// Sixteen bytes a thread; what does not fill them, or does not begin at a multiple of them, goes one by one.
__global__ void check_kernel(const __grid_constant__ Pack<ResultSpan> pack, uint32_t* words) {
  const auto [span, at, step] = pack.turn();
  bool bad = false;
  if (span.dtype == DType::f32) {
    auto* data = static_cast<uint32_t*>(span.data);
    const auto check = [&](uint32_t word, uint64_t i) {
      if ((word & kInfBits) != kInfBits) return;
      bad = true;
      if ((word & 0x7fffffffu) != kInfBits) data[i] = kMarker;  // as a processor would have it
    };
    const uint64_t fours = reinterpret_cast<uintptr_t>(data) % 16 == 0 ? span.count / 4 : 0;
    for (uint64_t i = at; i < fours; i += step) {
      const uint4 v = reinterpret_cast<const uint4*>(data)[i];
      check(v.x, 4 * i);
      check(v.y, 4 * i + 1);
      check(v.z, 4 * i + 2);
      check(v.w, 4 * i + 3);
    }
    for (uint64_t i = 4 * fours + at; i < span.count; i += step) check(data[i], i);
  } else {
    const auto* data = static_cast<const uint16_t*>(span.data);
    const uint32_t exponent = span.dtype == DType::f16 ? 0x7c00u : 0x7f80u;
    for (uint64_t i = at; i < span.count; i += step) bad |= (data[i] & exponent) == exponent;
  }
  if (bad) atomicOr(words, 1u);
}

__global__ void copy_kernel(const __grid_constant__ Pack<CopySpan> pack, const uint32_t* words) {
  if (*words == 0) return;
  const auto [span, at, step] = pack.turn();
  const auto* from = static_cast<const uint16_t*>(span.from);
  auto* to = static_cast<uint16_t*>(span.to);
  for (uint64_t i = at; i < span.count / 2; i += step) to[i] = from[i];
}

__global__ void end_kernel(uint32_t* words) {
  words[1] += words[0];
  words[2] = words[0];
  words[0] = 0;
}

}  // namespace

void cuda_check_finite(int index, void* stream, std::span<const ResultSpan> results, uint32_t* words) {
  in_packs(index, results, 4, [&](const Pack<ResultSpan>& pack, unsigned blocks) {
    enqueue<check_kernel>(blocks, kPackThreads, 0, static_cast<cudaStream_t>(stream), pack, words);
  });
}

void cuda_copy_if_bad(int index, void* stream, std::span<const CopySpan> spans, const uint32_t* words) {
  in_packs(index, spans, 16, [&](const Pack<CopySpan>& pack, unsigned blocks) {
    enqueue<copy_kernel>(blocks, kPackThreads, 0, static_cast<cudaStream_t>(stream), pack, words);
  });
}

void cuda_end_check(int index, void* stream, uint32_t* words) {
  cuda_throw(cudaSetDevice(index), "cudaSetDevice");
  enqueue<end_kernel>(1, 1, 0, static_cast<cudaStream_t>(stream), words);
  cuda_throw(cudaGetLastError(), "kernel launch");
}

}  // namespace gradwire
