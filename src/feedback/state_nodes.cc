// SPDX-License-Identifier: Apache-2.0
#include "feedback/state_nodes.h"

#include <fmt/format.h>

#include <cstring>

#include "gradwire/error.h"

namespace gradwire {
namespace {

constexpr const char* kName = "nodes";  // what codecs learn has a name with a colon

std::vector<std::byte> bytes_of_nodes(const StateNodes& nodes) {
  const uint32_t words[] = {nodes.nodes, nodes.per_node, nodes.position, 0};
  std::vector<std::byte> bytes(sizeof words);
  std::memcpy(bytes.data(), words, sizeof words);
  return bytes;
}

}  // namespace

std::string StateNodes::str() const {
  return nodes == 0 ? "one level" : fmt::format("{} nodes of {} ranks", nodes, per_node);
}

StateNodes nodes_of(const ExtraState& extras) {
  const auto found = extras.find(kName);
  if (found == extras.end()) return {};
  uint32_t words[4] = {};
  const bool whole = found->second.size() == sizeof words;
  if (whole) std::memcpy(words, found->second.data(), sizeof words);
  const uint64_t ranks = uint64_t{words[0]} * words[1];
  if (!whole || ranks == 0 || ranks > INT32_MAX || words[2] >= ranks)
    throw Error(ErrorKind::frame,
                fmt::format("the state is damaged: its nodes have {} bytes: {} nodes of {} ranks, position {}",
                            found->second.size(), words[0], words[1], words[2]),
                kName);
  return {words[0], words[1], words[2]};
}

void set_nodes(ExtraState& extras, const StateNodes& nodes) {
  if (nodes.nodes == 0)
    extras.erase(kName);
  else
    extras[kName] = bytes_of_nodes(nodes);
}

void set_nodes(ErrorFeedback& state, const StateNodes& nodes) {
  if (nodes.nodes > 0) state.set_extra(kName, bytes_of_nodes(nodes));
}

}  // namespace gradwire
