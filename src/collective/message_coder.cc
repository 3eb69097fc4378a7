// SPDX-License-Identifier: Apache-2.0
#include "collective/message_coder.h"

#include "core/bits.h"
#include "feedback/feedback_state.h"

namespace gradwire {

void MessageCoder::begin(const StepContext& context, Direction direction, float scale, std::span<const Shard> shards) {
  begun_ = false;
  if (!context.feedback) return;
  ResidualStore& store = FeedbackAccess::store(*context.feedback);
  if (context.idle.empty()) {
    if (!store.holds(places_)) places_ = store.places(direction, coding_.plan().tensors());
    store.begin(places_, context.step, scale, pointers_);
  } else {
    std::vector<TensorSpec> specs = coding_.plan().tensors();
    for (size_t i = 0; i < specs.size(); ++i)
      if (context.idle[shards[i].tensor]) specs[i].count = 0;  // nothing of this tensor takes part
    store.begin(store.places(direction, specs), context.step, scale, pointers_);
  }
  pointers_.residuals.decay = context.decay;
  begun_ = true;
}

void MessageCoder::encode(std::span<const void* const> shards, const Stamp& stamp, Bytes message, HostStaging& staging,
                          const Observe& observe, bool ahead) {
  const Residuals* residuals = begun_ ? &pointers_.residuals : nullptr;
  const Bytes at = staging.writable(message);
  coding_.runner().encode(shards, stamp, at, residuals);
  if (observe) observe(coding_.shared_runner(), shards, residuals, at);
  if (ahead) return;
  staging.written(message);
  begun_ = false;
}

void MessageCoder::decode(ConstBytes message, std::span<void* const> shards, Write write, const Stamp& expected,
                          HostStaging& staging) {
  coding_.runner().decode(staging.readable(message), shards, write, &expected);
}

uint64_t MessageCoder::signature() const {
  uint64_t hash = mix64(coding_.id());
  if (!begun_) return hash;
  const auto add = [&hash](uint64_t word) { hash = mix64(hash ^ word) + word; };
  add(float_bits(pointers_.residuals.loss_scale));
  add(float_bits(pointers_.residuals.decay));
  for (const void* before : pointers_.before) add(reinterpret_cast<uintptr_t>(before));
  for (const void* after : pointers_.after) add(reinterpret_cast<uintptr_t>(after));
  return hash;
}

}  // namespace gradwire
