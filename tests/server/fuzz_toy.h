// SPDX-License-Identifier: Apache-2.0
// The model that the fuzz targets of the server's protocol use: two shards and a buffer, and honest messages for them.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "gradwire/runner.h"
#include "server/frame.h"
#include "server/signature.h"

namespace gradwire::fuzz {

inline constexpr uint64_t kShardElements = 32;

inline server::Signature toy_signature(const char* up, const char* down, bool updates, bool pools) {
  server::Signature signature;
  signature.parameters = {{"w", {16}}, {"v", {4, 10}}};  // two shards
  signature.buffers = {{"b", {3}}};
  signature.up = up;
  signature.down = down;
  signature.sends_updates = updates;
  signature.pools = pools;
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

inline server::Blob blob_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return server::make_blob({bytes.begin(), bytes.end()});
}

}  // namespace gradwire::fuzz
