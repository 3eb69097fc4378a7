// SPDX-License-Identifier: Apache-2.0
#include "optim/adam.h"

#include "core/check.h"

namespace gradwire {

AdamRule adam_rule(const AdamOptions& options, uint64_t k, double rate, double factor) {
  GW_CHECK(k >= 1);
  const auto steps = static_cast<double>(k);
  const double correct1 = 1 - std::pow(options.beta1, steps), correct2 = 1 - std::pow(options.beta2, steps);
  return {.factor = static_cast<float>(factor),
          .keep = static_cast<float>(options.decoupled ? 1 - rate * options.weight_decay : 1),
          .weight_decay = static_cast<float>(options.decoupled ? 0 : options.weight_decay),
          .beta1 = static_cast<float>(options.beta1),
          .fresh1 = static_cast<float>(1 - options.beta1),
          .beta2 = static_cast<float>(options.beta2),
          .fresh2 = static_cast<float>(1 - options.beta2),
          .rate = static_cast<float>(rate / correct1),
          .root = static_cast<float>(std::sqrt(correct2)),
          .epsilon = static_cast<float>(options.epsilon)};
}

void sgd_step(const Elementwise& device, std::span<const OptimizerSpan> spans, const SgdOptions& options, double rate,
              double factor) {
  const auto weight_decay = static_cast<float>(options.weight_decay), momentum = static_cast<float>(options.momentum);
  if (options.momentum > 0)
    device.run(spans, SgdRule<true>{static_cast<float>(factor), weight_decay, momentum, static_cast<float>(rate)});
  else
    device.run(spans, SgdRule<false>{static_cast<float>(factor), weight_decay, momentum, static_cast<float>(rate)});
}

void adam_step(const Elementwise& device, std::span<const OptimizerSpan> spans, const AdamOptions& options, uint64_t k,
               double rate, double factor) {
  device.run(spans, adam_rule(options, k, rate, factor));
}

}  // namespace gradwire
