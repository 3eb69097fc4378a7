// SPDX-License-Identifier: Apache-2.0
// One message of a reduction: its plan, the runner that encodes and decodes it, and the residuals of the open step.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "collective/host_staging.h"
#include "feedback/residual_store.h"
#include "gradwire/collective.h"
#include "message/changing_runner.h"

namespace gradwire {

// The step that is encoded, and the residuals that take part in it.
struct StepContext {
  uint64_t step;
  ErrorFeedback* feedback;  // may be null
  float loss_scale, decay;
  std::span<const uint8_t> idle =
      {};  // per tensor of the job, or empty; an idle tensor keeps its residual in this step
};

class MessageCoder {
 public:
  MessageCoder(std::vector<TensorSpec> specs, const Device& device) : coding_(std::move(specs), device) {}
  size_t message_bytes() const { return plan().message_bytes(); }
  // The same tensors with other codecs. This may also come between begin() and encode().
  void recode(std::vector<TensorSpec> specs) { coding_.recode(std::move(specs)); }
  void begin(const StepContext& context, Direction direction, float scale, std::span<const Shard> shards);

  // `observe`, where given, sees what was encoded. With `ahead` the residuals stay as they are for a second encoding of
  // the same step, and the message is not sent. On a GPU both calls only enqueue.
  using Observe = std::function<void(const std::shared_ptr<Runner>&, std::span<const void* const> tensors,
                                     const Residuals*, ConstBytes message)>;
  void encode(std::span<const void* const> shards, const Stamp& stamp, Bytes message, HostStaging& staging,
              const Observe& observe = {}, bool ahead = false);
  void decode(ConstBytes message, std::span<void* const> shards, Write write, const Stamp& expected,
              HostStaging& staging);
  void wait() { coding_.wait(); }  // throws what decoding found, in this step or in the one before
  void poll() { coding_.poll(); }  // the same for what has been found so far, without waiting

  const Plan& plan() const { return coding_.plan(); }
  // What encode() and decode() would enqueue now follows from this, and from the addresses that they are given; the
  // step aside, where a clock has it.
  uint64_t signature() const;

 private:
  ChangingRunner coding_;
  ResidualPlaces places_;  // of the plan's tensors
  ErrorFeedback::Pointers pointers_;
  bool begun_ = false;  // pointers_ are those of the open step
};

}  // namespace gradwire
