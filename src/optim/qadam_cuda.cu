// SPDX-License-Identifier: Apache-2.0
// qadam on a GPU: the element body of qadam.h over arrays of the device, one thread an element, a row of thread blocks
// an array.
#include "device/cuda_packs.cuh"
#include "optim/qadam.h"

namespace gradwire {
namespace {

__global__ void qadam_kernel(Pack<QAdamSpan> pack, QAdamNumbers numbers) {
  const QAdamSpan s = pack.spans[blockIdx.y];
  for (uint64_t i = blockIdx.x * uint64_t{kPackThreads} + threadIdx.x; i < s.count;
       i += gridDim.x * uint64_t{kPackThreads}) {
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
  in_packs(index, spans, 1, [&](const Pack<QAdamSpan>& pack, dim3 grid) {
    qadam_kernel<<<grid, kPackThreads, 0, static_cast<cudaStream_t>(stream)>>>(pack, numbers);
  });
}

}  // namespace gradwire
