// SPDX-License-Identifier: Apache-2.0
// What a parameter server is told when it starts.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "server/signature.h"

namespace gradwire::server {

struct HubOptions {
  uint32_t min_workers = 1, max_workers = 256;
  bool async = false;
  uint64_t staleness = 4;    // async: the number of updates that a worker may be ahead of the slowest
  double deadline_s = 30;    // how long a step waits for stragglers
  double rejoin_s = 300;     // how long a worker that vanished may come back before it counts as lost
  double initial_s = 30;     // how long the first worker may take for each shard of the first weights
  double return_s = 60;      // how long the server waits, after a restart, for the workers it knew
  std::string checkpoint;    // a file; empty: nothing is saved
  uint64_t save_every = 50;  // steps
  std::string init;          // a safetensors file with the first weights
  ModelLimits limits;
  bool bench = false;  // takes `gradwire load`, and nobody else
  int threads = 0;     // 0: as many as the machine has
  uint64_t shard_elements = uint64_t{1} << 20;
  std::function<void(const nlohmann::json&)> log;  // may be empty; called from many threads, one at a time
  std::function<void(const char*)> save_hook;      // for tests
};

}  // namespace gradwire::server
