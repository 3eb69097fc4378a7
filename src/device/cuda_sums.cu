// SPDX-License-Identifier: Apache-2.0
// The sums of a GPU. A launch takes the addresses of up to kPack spans with it, one row of thread blocks each, so
// nothing is copied to the device first. Division is IEEE's, whatever the compiler was told about speed; rounding is
// the integer arithmetic of core/bits.h.
#include <algorithm>

#include "core/bits.h"
#include "device/cuda_job.h"
#include "device/sums.h"

namespace gradwire {
namespace {

constexpr size_t kPack = 64;
constexpr unsigned kThreads = 256, kRow = 1024;  // threads a block, blocks a row at most: a large span fills the device

template <class Span>
struct Pack {
  Span spans[kPack];
};

__global__ void divide_kernel(Pack<SumSpan> pack, float divisor) {
  const SumSpan sum = pack.spans[blockIdx.y];
  for (uint64_t i = blockIdx.x * uint64_t{kThreads} + threadIdx.x; i < sum.count; i += gridDim.x * uint64_t{kThreads}) {
    const uint32_t before = float_bits(sum.data[i]);
    uint32_t after = kMarker;
    if ((before & 0x7fffffffu) <= kInfBits) after = float_bits(__fdiv_rn(bits_float(before), divisor));
    if (after != before) sum.data[i] = bits_float(after);
  }
}

__global__ void narrow_kernel(Pack<NarrowSpan> pack) {
  const NarrowSpan& s = pack.spans[blockIdx.y];
  const float* from = s.from;
  auto* to = static_cast<uint16_t*>(s.to);
  const bool half = s.dtype == DType::f16;
  for (uint64_t i = blockIdx.x * uint64_t{kThreads} + threadIdx.x; i < s.count; i += gridDim.x * uint64_t{kThreads})
    to[i] = half ? f32_to_f16(from[i]) : f32_to_bf16(from[i]);
}

// launch(pack, grid) for the spans that are not empty, kPack at a time.
template <class Span, class Launch>
void in_packs(int index, std::span<const Span> spans, Launch&& launch) {
  cuda_throw(cudaSetDevice(index), "cudaSetDevice");
  Pack<Span> pack{};
  unsigned n = 0;
  uint64_t longest = 0;
  const auto flush = [&] {
    if (n == 0) return;
    const auto blocks = static_cast<unsigned>(std::min<uint64_t>((longest + kThreads - 1) / kThreads, kRow));
    launch(pack, dim3(blocks, n));
    cuda_throw(cudaGetLastError(), "kernel launch");
    n = 0;
    longest = 0;
  };
  for (const Span& span : spans) {
    if (span.count == 0) continue;
    pack.spans[n++] = span;
    longest = std::max(longest, span.count);
    if (n == kPack) flush();
  }
  flush();
}

}  // namespace

void cuda_divide(int index, void* stream, std::span<const SumSpan> sums, float divisor) {
  in_packs(index, sums, [&](const Pack<SumSpan>& pack, dim3 grid) {
    divide_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(pack, divisor);
  });
}

void cuda_narrow(int index, void* stream, std::span<const NarrowSpan> spans) {
  in_packs(index, spans, [&](const Pack<NarrowSpan>& pack, dim3 grid) {
    narrow_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(pack);
  });
}

}  // namespace gradwire
