// SPDX-License-Identifier: Apache-2.0
#include "optim/momentum.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "optim/momentum_rules.h"

namespace gradwire {
namespace {

constexpr uint64_t kLongestPause = 64;  // steps between two poolings
constexpr double kLeastShare = 1e-4;    // of the mean second moment: a hundredth of its root

double coupled_decay(const MomentumOptions& options) { return options.adam.decoupled ? 0 : options.adam.weight_decay; }

Denominator denominator(const MomentumOptions& options, uint64_t pooled) {
  GW_CHECK(pooled >= 1 || !options.adaptive);
  return {.root = static_cast<float>(std::sqrt(1 - std::pow(options.adam.beta2, static_cast<double>(pooled)))),
          .epsilon = static_cast<float>(options.adam.epsilon)};
}

}  // namespace

MomentumOptimizer::MomentumOptimizer(std::vector<Arrays> parameters, const MomentumOptions& options,
                                     const Device& device)
    : parameters_(std::move(parameters)), options_(options), elementwise_(device) {
  GW_CHECK(options.world >= 1);
  for (size_t i = 0; i < parameters_.size(); ++i) all_.push_back(i);
}

std::vector<OptimizerSpan> MomentumOptimizer::spans(Use use, std::span<const size_t> some,
                                                    std::span<const float* const> gradients) const {
  GW_CHECK(gradients.empty() || gradients.size() == some.size());
  std::vector<OptimizerSpan> list;
  for (size_t k = 0; k < some.size(); ++k) {
    const Arrays& p = parameters_[some[k]];
    const bool follows = use == Use::follow, steps = use == Use::step;
    list.push_back({.gradient = steps               ? p.values
                                : gradients.empty() ? nullptr
                                                    : gradients[k],
                    .first = follows ? p.own_first : p.first,
                    .second = follows ? p.own_second : p.second,
                    .shared = p.weights,
                    .out = steps ? p.weights : p.values,
                    .count = p.count});
  }
  return list;
}

void MomentumOptimizer::propose(std::span<const size_t> some, std::span<const float* const> gradients, double factor) {
  const std::vector<OptimizerSpan> list = spans(Use::proposal, some, gradients);
  const double beta = options_.adaptive ? options_.adam.beta1 : options_.momentum;
  const OwnGradient own{.factor = static_cast<float>(factor),
                        .weight_decay = static_cast<float>(coupled_decay(options_))};
  const auto keep = static_cast<float>(beta), fresh = static_cast<float>(options_.adaptive ? 1 - beta : 1);
  // The bias of a young momentum is corrected later, and makes the update larger.
  const double limit = kLargestUpdate * (1 - std::pow(beta, static_cast<double>(counts.taken + 1)));
  if (options_.adaptive)
    elementwise_.run(
        list, ProposalRule<true>{own, keep, fresh, static_cast<float>(limit), denominator(options_, counts.pooled)});
  else
    elementwise_.run(list, ProposalRule<false>{own, keep, fresh, 0, {}});
}

void MomentumOptimizer::to_momenta() {
  if (options_.adaptive)
    elementwise_.run(spans(Use::momenta, all_, {}), MeanMomentumRule{denominator(options_, counts.pooled)});
}

void MomentumOptimizer::step(std::span<const float* const> gradients, double factor, double rate, double clip) {
  follow(gradients, factor);
  ++counts.taken;
  const double correct = options_.adaptive ? 1 - std::pow(options_.adam.beta1, static_cast<double>(counts.taken)) : 1;
  const double keep = options_.adam.decoupled ? 1 - rate * options_.adam.weight_decay : 1;
  const std::vector<OptimizerSpan> list = spans(Use::step, all_, {});
  const auto clipped = static_cast<float>(clip), kept = static_cast<float>(keep),
             corrected = static_cast<float>(rate / correct);
  if (options_.adaptive)
    elementwise_.run(list, MomentumStepRule<true>{clipped, kept, corrected, denominator(options_, counts.pooled)});
  else
    elementwise_.run(list, MomentumStepRule<false>{clipped, kept, corrected, {}});
}

void MomentumOptimizer::exact_step(std::span<const float* const> gradients, double factor, double rate,
                                   double mean_factor) {
  GW_CHECK(exact());
  follow(gradients, factor);
  ++counts.taken;
  adam_step(elementwise_, spans(Use::step, all_, {}), options_.adam, 1, rate, mean_factor);
}

// The weights are still those that the gradients were computed at, which the decay needs.
void MomentumOptimizer::follow(std::span<const float* const> gradients, double factor) {
  if (!options_.adaptive) return;
  const double rho = (options_.world - 1.0) / (options_.world + 1.0), j = static_cast<double>(counts.taken + 1);
  elementwise_.run(
      spans(Use::follow, all_, gradients),
      OwnMomentsRule{
          .own = {.factor = static_cast<float>(factor), .weight_decay = static_cast<float>(coupled_decay(options_))},
          .rho = static_cast<float>(rho),
          .fresh = static_cast<float>(1 - rho),
          .correct = static_cast<float>(1 / (1 - std::pow(rho, j))),
          .beta2 = static_cast<float>(options_.adam.beta2),
          .fresh2 = static_cast<float>(1 - options_.adam.beta2),
      });
}

void MomentumOptimizer::lift(std::span<float> host) {
  double sum = 0;
  for (const float value : host) sum += value;
  const auto least = static_cast<float>(kLeastShare * sum / static_cast<double>(std::max<size_t>(1, host.size())));
  for (float& value : host) value = std::max(value, least);
}

void MomentumOptimizer::pooled() {
  counts.pooled = counts.taken;
  counts.next = next_pooling(counts.taken);
}

uint64_t next_pooling(uint64_t k) { return k + std::clamp<uint64_t>(k / 4, 1, kLongestPause); }

}  // namespace gradwire
