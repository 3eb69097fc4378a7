// SPDX-License-Identifier: Apache-2.0
#include "train/gradient_limits.h"

#include <torch/autograd.h>

#include "core/check.h"

namespace gradwire::train {
namespace {

constexpr double kMemory = 20;   // steps
constexpr double kSurprise = 3;  // times its level is the most that a norm counts

}  // namespace

GradientLimits::GradientLimits(size_t parameters, double clip, torch::Device device)
    : clip_(clip),
      levels_(torch::zeros({static_cast<int64_t>(parameters) + 1}, torch::dtype(torch::kDouble).device(device))),
      seen_(torch::zeros({static_cast<int64_t>(parameters)}, torch::dtype(torch::kDouble).device(device))) {}

void GradientLimits::apply(std::span<const size_t> some, const std::vector<torch::Tensor>& gradients,
                           double loss_scale) {
  if (clip_ <= 0 || some.empty()) return;
  GW_CHECK(some.size() == gradients.size());
  torch::NoGradGuard no_grad;
  const torch::Tensor which =
      torch::tensor(std::vector<int64_t>(some.begin(), some.end()), torch::kInt64).to(seen_.device());
  const torch::Tensor norms = torch::stack(torch::_foreach_norm(gradients, 2)).to(torch::kDouble) / loss_scale;
  seen_.index_copy_(0, which, norms);
  // A parameter without a level, as in the first step, counts with its norm. So a first call with all parameters clips
  // by the norm of the whole gradient.
  const torch::Tensor known = levels_.slice(0, 1), mine = known.index_select(0, which);
  const torch::Tensor levels = torch::where(mine > 0, mine, norms);
  const torch::Tensor all = torch::where(known > 0, known, seen_).norm();
  const torch::Tensor factors = (clip_ * levels / (norms * all + 1e-30)).clamp_max(1).to(gradients[0].scalar_type());
  torch::_foreach_mul_(gradients, factors.unbind());
}

void GradientLimits::commit() {
  if (clip_ <= 0) return;
  torch::NoGradGuard no_grad;
  torch::Tensor steps = levels_[0], levels = levels_.slice(0, 1);
  steps.add_(1);
  const torch::Tensor next = levels + (torch::min(seen_, kSurprise * levels) - levels) / steps.clamp_max(kMemory);
  // A parameter that was not used keeps its level, and one that is used for the first time gets one.
  levels.copy_(torch::where(seen_ > 0, torch::where(levels > 0, next, seen_), levels));
  seen_.zero_();
}

}  // namespace gradwire::train
