// SPDX-License-Identifier: Apache-2.0
// The model that the fuzz targets of the server's protocol use: two shards and a buffer, and honest messages for them.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "gradwire/runner.h"
#include "server/frame.h"
#include "server/shard_coders.h"
#include "server/signature.h"

namespace gradwire::fuzz {

inline constexpr uint64_t kShardElements = 32;

inline server::Signature toy_signature(const char* up, const char* down, bool updates, bool pools, uint64_t steps = 0) {
  server::Signature signature;
  signature.parameters = {{"w", {16}}, {"v", {4, 10}}};  // two shards
  signature.buffers = {{"b", {3}}};
  signature.up = up;
  signature.down = down;
  signature.sends_updates = updates;
  signature.pools = pools;
  signature.steps = steps;
  return signature;
}

inline server::Blob encode(const std::vector<TensorSpec>& specs, float fill) {
  const Plan plan(specs);
  std::vector<std::vector<float>> values;
  std::vector<const void*> in;
  for (const TensorSpec& one : specs) in.push_back(values.emplace_back(one.count, fill).data());
  std::vector<std::byte> message(plan.message_bytes());
  make_runner(plan, {})->encode(in, {}, message);
  return server::make_blob(std::move(message));
}

// An update as a worker sends it that has learned nothing yet: a message, and the statistics that are due behind it.
struct ToyUpdate {
  server::Blob payload;
  uint64_t tail;
};

inline ToyUpdate encode_update(const server::Signature& signature, const server::ShardLayout& layout, float fill,
                               uint64_t step) {
  using server::ShardMessage;
  server::ShardWriter writer(server::specs_of(signature, layout, ShardMessage::up), Direction::up, {},
                             server::run_of(signature, layout, false));
  Runner& runner = writer.runner(step);
  std::vector<std::vector<float>> values;
  std::vector<const void*> in;
  for (const TensorSpec& one : runner.plan().tensors()) {
    in.push_back(values.emplace_back(one.count, fill).data());
    if (one.count > 2) values.back()[1] = -fill / 3;
  }
  std::vector<std::byte> payload(writer.message_bytes());
  runner.encode(in, {}, payload);
  const std::vector<std::byte> tail = writer.learning().observe(runner, step, step, in, nullptr, payload);
  payload.insert(payload.end(), tail.begin(), tail.end());
  return {server::make_blob(std::move(payload)), tail.size()};
}

// Codecs of updates that learn, and fit as often as they can.
inline const char* learning_codec(uint8_t which) {
  static constexpr const char* kCodecs[] = {
      "optquant:bits=3,refit=1", "casq:bits=2,refit=1",       "casq:mode=paper,rule=entropy,refit=1,start=1",
      "dqsgd:budget=4",          "rangefloat:bits=8,refit=1", "1d=casq:refit=1;*=optquant:refit=2"};
  return kCodecs[which % (sizeof kCodecs / sizeof *kCodecs)];
}

inline server::Blob blob_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return server::make_blob({bytes.begin(), bytes.end()});
}

}  // namespace gradwire::fuzz
