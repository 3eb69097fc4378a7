// SPDX-License-Identifier: Apache-2.0
// The element rules on a GPU: many arrays to a launch (device/cuda_packs.cuh).
#include "device/cuda_packs.cuh"
#include "optim/adam.h"
#include "optim/momentum_rules.h"
#include "optim/qadam.h"

namespace gradwire {
namespace {

template <class Rule>
__global__ void elementwise_kernel(const __grid_constant__ Pack<OptimizerSpan> pack, Rule rule) {
  const auto [s, at, step] = pack.turn();
  for (uint64_t i = at; i < s.count; i += step) rule(s, i);
}

}  // namespace

template <class Rule>
void cuda_elementwise(int index, void* stream, std::span<const OptimizerSpan> spans, const Rule& rule) {
  in_packs(index, spans, 1, [&](const Pack<OptimizerSpan>& pack, unsigned blocks) {
    enqueue<elementwise_kernel<Rule>>(blocks, kPackThreads, 0, static_cast<cudaStream_t>(stream), pack, rule);
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
