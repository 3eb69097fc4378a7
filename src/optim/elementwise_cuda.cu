// SPDX-License-Identifier: Apache-2.0
// The element rules on a GPU: one thread per element, one row of thread blocks per array.
#include "device/cuda_packs.cuh"
#include "optim/adam.h"
#include "optim/momentum_rules.h"
#include "optim/qadam.h"

namespace gradwire {
namespace {

template <class Rule>
__global__ void elementwise_kernel(Pack<OptimizerSpan> pack, Rule rule) {
  const OptimizerSpan s = pack.spans[blockIdx.y];
  for (uint64_t i = blockIdx.x * uint64_t{kPackThreads} + threadIdx.x; i < s.count;
       i += gridDim.x * uint64_t{kPackThreads})
    rule(s, i);
}

}  // namespace

template <class Rule>
void cuda_elementwise(int index, void* stream, std::span<const OptimizerSpan> spans, const Rule& rule) {
  in_packs(index, spans, 1, [&](const Pack<OptimizerSpan>& pack, dim3 grid) {
    elementwise_kernel<<<grid, kPackThreads, 0, static_cast<cudaStream_t>(stream)>>>(pack, rule);
  });
}

template void cuda_elementwise(int, void*, std::span<const OptimizerSpan>, const SgdRule<true>&);
template void cuda_elementwise(int, void*, std::span<const OptimizerSpan>, const SgdRule<false>&);
template void cuda_elementwise(int, void*, std::span<const OptimizerSpan>, const AdamRule&);
template void cuda_elementwise(int, void*, std::span<const OptimizerSpan>, const ProposalRule<true>&);
template void cuda_elementwise(int, void*, std::span<const OptimizerSpan>, const ProposalRule<false>&);
template void cuda_elementwise(int, void*, std::span<const OptimizerSpan>, const MeanMomentumRule&);
template void cuda_elementwise(int, void*, std::span<const OptimizerSpan>, const MomentumStepRule<true>&);
template void cuda_elementwise(int, void*, std::span<const OptimizerSpan>, const MomentumStepRule<false>&);
template void cuda_elementwise(int, void*, std::span<const OptimizerSpan>, const OwnMomentsRule&);
template void cuda_elementwise(int, void*, std::span<const OptimizerSpan>, const QAdamRule<true, true>&);
template void cuda_elementwise(int, void*, std::span<const OptimizerSpan>, const QAdamRule<true, false>&);
template void cuda_elementwise(int, void*, std::span<const OptimizerSpan>, const QAdamRule<false, true>&);
template void cuda_elementwise(int, void*, std::span<const OptimizerSpan>, const QAdamRule<false, false>&);

}  // namespace gradwire
