// SPDX-License-Identifier: Apache-2.0
// The server's checkpoint at a command line, for the tests in Python:
//
//   store_tool save FILE    saves a state whose numbers the test knows
//   store_tool show FILE    what a safetensors file holds, as JSON: its metadata, and its tensors with the bits of
//                           their values as floats; of a server's checkpoint also step, signature and workers
//
// An error goes to standard error, kind and field first, with exit status 1.
#include <bit>
#include <cstdio>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "gradwire/error.h"
#include "server/checkpoint.h"

namespace {

using namespace gradwire;
using namespace gradwire::server;
using nlohmann::json;

ServerState known_state() {
  ServerState state;
  state.step = 123;
  state.signature = {{"model", "cnn"}, {"tensors", 3}};
  state.extra = {{"mode", "sync"}};
  const float nan = std::bit_cast<float>(0x7fc12345u);
  state.weights = {{"conv.weight", {2, 3}, {1.5f, -2.25f, 0x1p-140f, -0.0f, nan, 3e38f}},
                   {"größe", {}, {0.1f}},
                   {"empty", {0, 7}, {}}};
  state.buffers = {{"bn.running_mean", {3}, {0, 1, 2}}};
  state.others = {{"gradwire.residual", {2}, {-1, 1e-20f}}};
  state.workers = {{"w-1", "first", false, {7, 8}, {0.1, 1e300}, {-0.0, 5e-324}, {{"lag", 2}}},
                   {"w-2", "zweite", true, {1, 2}, {0, 1}, {0, 0}, nullptr}};
  return state;
}

void show(const std::string& path) {
  const SafetensorsFile file(path);
  json all = {{"metadata", file.metadata()}, {"tensors", json::object()}};
  for (const StoredTensor& tensor : file.tensors()) {
    json entry = {{"dtype", tensor.dtype}, {"shape", tensor.shape}};
    if (SafetensorsFile::is_float(tensor))
      for (const float value : file.read_f32(tensor)) entry["bits"].push_back(std::bit_cast<uint32_t>(value));
    all["tensors"][tensor.name] = entry;
  }
  if (file.find("gradwire.state")) {
    const ServerState state = load_state(path);
    all["step"] = state.step;
    all["signature"] = state.signature;
    for (const WorkerRow& row : state.workers) all["workers"].push_back({{"id", row.id}, {"sequence", row.sequence}});
  }
  std::printf("%s\n", all.dump().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc == 3 ? argv[1] : "";
  try {
    if (what == "save") return save_state(argv[2], known_state()), 0;
    if (what == "show") return show(argv[2]), 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "%d %s: %s\n", static_cast<int>(error.kind()), error.field().c_str(), error.what());
    return 1;
  }
  std::fprintf(stderr, "usage: store_tool save|show FILE\n");
  return 2;
}
