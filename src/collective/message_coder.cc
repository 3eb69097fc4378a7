// SPDX-License-Identifier: Apache-2.0
#include "collective/message_coder.h"

namespace gradwire {

void MessageCoder::begin(const StepContext& context, Direction direction, float scale, std::span<const Shard> shards) {
  residuals_.reset();
  if (!context.feedback) return;
  std::vector<TensorSpec> specs = coding_.plan().tensors();
  for (size_t i = 0; i < specs.size() && !context.idle.empty(); ++i)
    if (context.idle[shards[i].tensor]) specs[i].count = 0;  // nothing of this tensor takes part
  residuals_ = context.feedback->begin(direction, context.step, specs, scale);
  residuals_->residuals.decay = context.decay;
}

void MessageCoder::encode(std::span<const void* const> shards, const Stamp& stamp, Bytes message, HostStaging& staging,
                          const Observe& observe, bool ahead) {
  const Residuals* residuals = residuals_ ? &residuals_->residuals : nullptr;
  const Bytes at = staging.writable(message);
  coding_.runner().encode(shards, stamp, at, residuals);
  if (observe) observe(coding_.shared_runner(), shards, residuals, at);
  if (ahead) return;
  staging.written(message);
  residuals_.reset();
}

void MessageCoder::decode(ConstBytes message, std::span<void* const> shards, Write write, const Stamp& expected,
                          HostStaging& staging) {
  coding_.runner().decode(staging.readable(message), shards, write, &expected);
}

}  // namespace gradwire
