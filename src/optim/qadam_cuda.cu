// SPDX-License-Identifier: Apache-2.0
// qadam on a GPU: the element body of qadam.h over arrays of the device, one thread an element, a row of thread blocks
// an array. A launch takes the addresses of up to kPack arrays with it, so nothing is copied to the device first.
#include <algorithm>

#include "device/cuda_job.h"
#include "optim/qadam.h"

namespace gradwire {
namespace {

constexpr size_t kPack = 64;  // 3 KiB of the 4 KiB that a launch may carry
constexpr unsigned kThreads = 256,
                   kRow = 1024;  // threads a block, blocks a row at most: a large array fills the device

struct Pack {
  QAdamSpan spans[kPack];
};

__global__ void qadam_kernel(Pack pack, QAdamNumbers numbers) {
  const QAdamSpan s = pack.spans[blockIdx.y];
  for (uint64_t i = blockIdx.x * uint64_t{kThreads} + threadIdx.x; i < s.count; i += gridDim.x * uint64_t{kThreads}) {
    const float g = s.gradient ? s.gradient[i] : 0.0f;
    float m = s.first[i], v = s.second[i];
    s.update[i] =
        s.shared ? qadam_element<true>(numbers, g, m, v, s.shared[i]) : qadam_element<false>(numbers, g, m, v, v);
    s.first[i] = m;
    s.second[i] = v;
  }
}

}  // namespace

void cuda_qadam(int index, void* stream, std::span<const QAdamSpan> spans, const QAdamNumbers& numbers) {
  cuda_throw(cudaSetDevice(index), "cudaSetDevice");
  Pack pack{};
  unsigned n = 0;
  uint64_t longest = 0;
  const auto flush = [&] {
    if (n == 0) return;
    const auto blocks = static_cast<unsigned>(std::min<uint64_t>((longest + kThreads - 1) / kThreads, kRow));
    qadam_kernel<<<dim3(blocks, n), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(pack, numbers);
    cuda_throw(cudaGetLastError(), "kernel launch");
    n = 0;
    longest = 0;
  };
  for (const QAdamSpan& span : spans) {
    if (span.count == 0) continue;
    pack.spans[n++] = span;
    longest = std::max(longest, span.count);
    if (n == kPack) flush();
  }
  flush();
}

}  // namespace gradwire
