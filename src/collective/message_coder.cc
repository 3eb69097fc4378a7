// SPDX-License-Identifier: Apache-2.0
#include "collective/message_coder.h"

#include <utility>

namespace gradwire {
namespace {

std::vector<Codec> codecs_of(const std::vector<TensorSpec>& specs) {
  std::vector<Codec> codecs;
  for (const TensorSpec& spec : specs) codecs.push_back(spec.codec);
  return codecs;
}

}  // namespace

MessageCoder::MessageCoder(std::vector<TensorSpec> specs, const Device& device)
    : device_(device), now_(std::make_unique<Coding>(std::move(specs), device)) {}

void MessageCoder::recode(std::vector<TensorSpec> specs) {
  const std::vector<Codec> wanted = codecs_of(specs);
  const bool again = wanted == before_;
  before_ = codecs_of(plan().tensors());
  if (again && other_) {
    std::swap(now_, other_);
    return;
  }
  other_.reset();  // before a third is made
  auto fresh = std::make_unique<Coding>(std::move(specs), device_);
  if (again) other_ = std::move(now_);
  now_ = std::move(fresh);
}

void MessageCoder::wait() {
  runner().wait();
  if (other_) other_->runner->wait();
}

void MessageCoder::poll() {
  runner().poll();
  if (other_) other_->runner->poll();
}

void MessageCoder::begin(const StepContext& context, Direction direction, float scale, std::span<const Shard> shards) {
  residuals_.reset();
  if (!context.feedback) return;
  if (context.idle.empty()) {
    residuals_ = context.feedback->begin(direction, context.step, plan().tensors(), scale);
    return;
  }
  std::vector<TensorSpec> specs = plan().tensors();
  for (size_t i = 0; i < specs.size(); ++i)
    if (context.idle[shards[i].tensor]) specs[i].count = 0;  // nothing of this tensor takes part
  residuals_ = context.feedback->begin(direction, context.step, specs, scale);
}

void MessageCoder::encode(std::span<const void* const> shards, const Stamp& stamp, Bytes message, HostStaging& staging,
                          const Observe& observe, bool ahead) {
  const Residuals* residuals = residuals_ ? &residuals_->residuals : nullptr;
  const Bytes at = staging.writable(message);
  runner().encode(shards, stamp, at, residuals);
  if (observe) observe(runner(), shards, residuals, at);
  if (ahead) return;
  staging.written(message);
  residuals_.reset();
}

void MessageCoder::decode(ConstBytes message, std::span<void* const> shards, Write write, const Stamp& expected,
                          HostStaging& staging) {
  runner().decode(staging.readable(message), shards, write, &expected);
}

}  // namespace gradwire
