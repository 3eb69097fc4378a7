// SPDX-License-Identifier: Apache-2.0
#include "server/server_model.h"

#include <algorithm>

namespace gradwire::server {

ServerModel::ServerModel(const Signature& given, uint64_t shard_elements, bool async)
    : signature(given),
      layouts(shard_layouts(given, shard_elements)),
      queues(layouts.size()),
      buffer_plan(buffer_specs(given)),
      buffer_runner(make_runner(buffer_plan, {})),
      versions(layouts.size()),
      durable(layouts.size()),
      skipped(layouts.size()),
      applied(layouts.size()),
      tallies(layouts.size()),
      bytes(layouts.size()),
      ready(layouts.size()),
      open(layouts.size()) {
  for (size_t i = 0; i < layouts.size(); ++i) {
    queues[i].shard = std::make_unique<ServerShard>(signature, layouts[i], async);
    ready[i] = queues[i].shard->ready();
    bytes[i] = queues[i].shard->bytes();
  }
}

size_t ServerModel::weight_shards() const { return signature.pools ? layouts.size() / 2 : layouts.size(); }

uint64_t ServerModel::step() const {
  return *std::min_element(versions.begin(), versions.begin() + static_cast<std::ptrdiff_t>(weight_shards()));
}

uint64_t ServerModel::durable_step() const {
  return *std::min_element(durable.begin(), durable.begin() + static_cast<std::ptrdiff_t>(weight_shards()));
}

// In asynchronous mode a version is an update that was applied, so those that were skipped come on top.
ServerModel::StepCounts ServerModel::step_counts(bool async) const {
  const auto most = std::max_element(skipped.begin(), skipped.begin() + static_cast<std::ptrdiff_t>(weight_shards()));
  const auto shard = static_cast<size_t>(most - skipped.begin());
  return {.skipped = *most, .tried = versions[shard] + (async ? *most : 0)};
}

bool ServerModel::whole() const {
  return std::all_of(ready.begin(), ready.end(), [](char one) { return one; });
}

uint64_t ServerModel::memory_bytes() const {
  uint64_t sum = 0;
  for (uint64_t one : bytes) sum += one;
  return sum;
}

void ServerModel::set_buffers(const Blob& payload) {
  // Decoded once here, so that neither a checkpoint nor a joiner meets a message that cannot be read.
  std::vector<std::vector<float>> values;
  std::vector<void*> out;
  for (const TensorSpec& spec : buffer_plan.tensors()) out.push_back(values.emplace_back(spec.count).data());
  buffer_runner->decode(*payload, out);
  buffers = payload;
}

}  // namespace gradwire::server
