// SPDX-License-Identifier: Apache-2.0
// What all workers of a server must agree on: names and shapes of the parameters and buffers, and how they travel. The
// first worker (or a checkpoint) brings it; a joiner with another one is told the first difference. The shards
// follow from it and from their size alone, so both sides know them without sending them.
//
// A shard is what moves, closes, is acknowledged and saved as one: some whole tensors, or a range of a large one.
// Shards are independent of each other, so one goes down while the next comes up.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gradwire/collective.h"
#include "gradwire/plan.h"
#include "gradwire/rules.h"

namespace gradwire::server {

struct Variable {
  std::string name;
  std::vector<int64_t> shape;
  uint64_t count() const;
};

// Where updates are gradients, the server makes the step: SGD with momentum, as optim/adam.h has it.
struct ServerSgd {
  double momentum = 0, weight_decay = 0;
  friend bool operator==(const ServerSgd&, const ServerSgd&) = default;
};

inline constexpr uint64_t kMostSteps = 1'000'000'000;  // of a run

struct Signature {
  std::vector<Variable> parameters, buffers;
  std::string up = "loggrid:k=2", down = "unigrid:bits=8";  // specs or rules
  // Of updates; of what goes down, on or off follows from it (collective/feedback_rule.h).
  ReduceOptions::Feedback feedback = ReduceOptions::Feedback::codec;
  bool sends_updates = false;  // the server sends quantised changes, with error feedback, instead of quantised weights
  bool pools = false;          // workers share their second moments
  std::optional<ServerSgd> sgd = {};  // none: the workers run an optimizer, and the server subtracts their updates
  // These two are the first worker's; no other worker is refused for having others.
  uint64_t seed = 0;   // of random rounding on the way down
  uint64_t steps = 0;  // of the run, for codecs that plan with it; 0: not known
  std::string model;   // for people

  nlohmann::json json() const;
  static Signature parse(const nlohmann::json& text);  // Error{frame, "signature"}: hostile input
  // In words, what is different in `other`; empty if nothing is.
  std::string difference(const Signature& other) const;
  uint64_t elements() const;
};

struct ModelLimits {
  uint64_t max_elements = uint64_t{1} << 33;
  uint64_t max_tensors = 100000;
};
void check_limits(const Signature& signature, const ModelLimits& limits);  // Error{usage, "elements" | "tensors"}

// Some consecutive elements of a parameter.
struct ParameterRange {
  size_t parameter;
  uint64_t first, count;
};

enum class ShardRole : uint8_t { weights, pool };

struct ShardLayout {
  ShardRole role;
  std::vector<ParameterRange> ranges;
  uint64_t elements() const;
  std::vector<float> gather(std::span<const std::span<const float>> parameters) const;  // its ranges, one after another
};

// First the shards of the weights, then, if workers pool their second moments, those of the pool, with the same ranges.
std::vector<ShardLayout> shard_layouts(const Signature& signature, uint64_t shard_elements = uint64_t{1} << 20);

// What a message of a shard is for: an update, the answer to it, or all weights in fp32.
enum class ShardMessage { up, down, whole };
std::vector<TensorSpec> specs_of(const Signature& signature, const ShardLayout& layout, ShardMessage message);
std::vector<TensorSpec> buffer_specs(const Signature& signature);  // by fp32

}  // namespace gradwire::server
