// SPDX-License-Identifier: Apache-2.0
#include "collective/message_coder.h"

#include <utility>

namespace gradwire {

MessageCoder::MessageCoder(std::vector<TensorSpec> specs, const Device& device)
    : device_(device), plan_(std::move(specs)), runner_(make_runner(plan_, device)) {}

void MessageCoder::recode(std::vector<TensorSpec> specs) {
  runner_.reset();  // it refers to the plan
  plan_ = Plan(std::move(specs));
  runner_ = make_runner(plan_, device_);
}

void MessageCoder::begin(const StepContext& context, Direction direction, float scale, std::span<const Shard> shards) {
  residuals_.reset();
  if (!context.feedback) return;
  if (context.idle.empty()) {
    residuals_ = context.feedback->begin(direction, context.step, plan_.tensors(), scale);
    return;
  }
  std::vector<TensorSpec> specs = plan_.tensors();
  for (size_t i = 0; i < specs.size(); ++i)
    if (context.idle[shards[i].tensor]) specs[i].count = 0;  // nothing of this tensor takes part
  residuals_ = context.feedback->begin(direction, context.step, specs, scale);
}

void MessageCoder::encode(std::span<const void* const> shards, const Stamp& stamp, Bytes message, HostStaging& staging,
                          const Observe& observe, bool ahead) {
  const Residuals* residuals = residuals_ ? &residuals_->residuals : nullptr;
  const Bytes at = staging.writable(message);
  runner_->encode(shards, stamp, at, residuals);
  if (observe) observe(*runner_, shards, residuals, at);
  if (ahead) return;
  staging.written(message);
  residuals_.reset();
}

void MessageCoder::decode(ConstBytes message, std::span<void* const> shards, Write write, const Stamp& expected,
                          HostStaging& staging) {
  runner_->decode(staging.readable(message), shards, write, &expected);
}

}  // namespace gradwire
