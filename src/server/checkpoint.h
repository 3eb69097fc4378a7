// SPDX-License-Identifier: Apache-2.0
// The server's checkpoint: one safetensors file (safetensors.h) with everything a server needs to go on at a step.
//
//   parameters and buffers   F32, by their own names: Python loads them without knowing of gradwire
//   gradwire.*               F32, the server's own arrays
//   gradwire.state           U8: a JSON text with the step, the signature, the workers' table and which name is what
//   gradwire.check           U8 [8]: XXH3_64 of the whole file before it
//
// Numbers of the ledger are stored as the 16 hex digits of their bits, so that any double is loaded as it was saved.
// __metadata__ has the format, its version and the step, for people and other programs.
//
// From the first save on, the path holds a whole file at every instant: the last one saved. path + ".old" holds the one
// before it, in case the path is damaged afterwards.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "io/safetensors.h"

namespace gradwire::server {

using namespace io;  // a checkpoint is a safetensors file

inline constexpr uint64_t kMaxStateBytes = 100'000'000;  // of the JSON text

struct WorkerRow {
  std::string id;  // no two rows have the same
  std::string name;
  bool left = false;
  // One for each shard.
  std::vector<uint64_t> sequence;
  std::vector<double> computed;
  std::vector<double> residual;
  nlohmann::json extra;
};

struct StoredArray {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

struct ServerState {
  uint64_t step = 0;
  nlohmann::json signature = nlohmann::json::object();
  nlohmann::json extra;
  std::vector<WorkerRow> workers;
  std::vector<StoredArray> weights;  // by their own names, which do not begin with "gradwire."
  std::vector<StoredArray> buffers;  // likewise
  std::vector<StoredArray> others;   // names begin with "gradwire."
};

// Error{usage} names what cannot be stored (a name of ours, a text that is not UTF-8, a number in the opaque JSON that
// is not finite); Error{io} the path and the reason. Either way the path holds what it held.
void save_state(const std::string& path, const ServerState& state, const WriteHook& hook = {});

// Error{io} if the file cannot be read; Error{frame} with the field at fault if it is damaged, not a server's, or of
// another version.
ServerState load_state(const std::string& path);

// The newest of path and path + ".old" that is whole. If that is not the path, `note` says why. Nothing if neither
// exists; an Error if none of those that exist can be loaded.
std::optional<ServerState> load_newest(const std::string& path, std::string* note = nullptr);

}  // namespace gradwire::server
