// SPDX-License-Identifier: Apache-2.0
// A model and its workers as a checkpoint holds them (checkpoint.h), both ways.
#pragma once

#include <memory>
#include <set>
#include <vector>

#include "server/checkpoint.h"
#include "server/membership.h"
#include "server/server_model.h"

namespace gradwire::server {

// A checkpoint in the making: what the strands have copied.
struct ModelCopy {
  std::vector<ShardSnapshot> shards;
  size_t missing = 0;                           // shards that are not copied yet
  std::set<uint32_t> left;                      // the workers that had left before it was begun
  std::vector<std::weak_ptr<Session>> leavers;  // they wait until their residuals are on disk
};

// The large part, made without the lock: weights, residuals and pools.
ServerState copied_arrays(const ServerModel& model, const ModelCopy& copy);
// The rest, with the hub's mutex held: buffers and the table of workers.
void add_bookkeeping(ServerState& state, const ServerModel& model, const ModelCopy& copy, const HubOptions& options,
                     const Membership& membership);

// The model of a checkpoint; its workers go into `membership`, and the size of its shards into `options`.
// Error{frame} if it does not fit together, Error{usage} if it was saved in the other mode.
std::shared_ptr<ServerModel> restore_model(const ServerState& state, HubOptions& options, Membership& membership);

}  // namespace gradwire::server
