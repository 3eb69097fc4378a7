// SPDX-License-Identifier: Apache-2.0
#include "engine/group_engine.h"

#include <utility>

#include "core/check.h"
#include "engine/call.h"

namespace gradwire {

using namespace engine_detail;

namespace {

struct AlreadyDone final : Handle::State {
  void wait() override {}
};

}  // namespace

GroupEngine::GroupEngine(Engine& whole, std::vector<int> ranks) : whole_(whole), ranks_(std::move(ranks)) {
  for (size_t i = 0; i < ranks_.size(); ++i)
    if (ranks_[i] == whole.rank()) rank_ = static_cast<int>(i);
  GW_CHECK(rank_ >= 0);
}

Handle GroupEngine::all_to_all(std::span<const ConstBytes> send, std::span<const Bytes> recv) {
  const Call call = all_to_all_call(size(), send, recv);
  if (size() == 1 && call.send[0].size() == call.recv[0].size()) {
    copy_bytes(call.send[0], call.recv[0]);
    return Handle(std::make_unique<AlreadyDone>());
  }
  const auto world = static_cast<size_t>(whole_.size());
  std::vector<ConstBytes> to(world);
  std::vector<Bytes> from(world);
  for (size_t i = 0; i < ranks_.size(); ++i) {
    to[static_cast<size_t>(ranks_[i])] = call.send[i];
    from[static_cast<size_t>(ranks_[i])] = call.recv[i];
  }
  Handle handle = whole_.all_to_all(to, from);
  bytes_sent_ += payload_bytes(call, rank_);
  return handle;
}

Handle GroupEngine::all_gather(ConstBytes mine, std::span<const Bytes> recv) {
  return all_to_all(std::vector<ConstBytes>(ranks_.size(), mine), recv);
}

Handle GroupEngine::broadcast(Bytes data, int root) {
  const Call call = broadcast_call(size(), rank_, data, root);
  return all_to_all(call.send, call.recv);
}

Handle GroupEngine::barrier() { return size() == 1 ? Handle(std::make_unique<AlreadyDone>()) : whole_.barrier(); }

std::unique_ptr<Engine> GroupEngine::split(int) {
  throw Error(ErrorKind::unsupported, "a group of an engine's ranks cannot be split", "engine");
}

}  // namespace gradwire
