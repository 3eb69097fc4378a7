// SPDX-License-Identifier: Apache-2.0
#include "c/callback_engine.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "c/boundary.h"

namespace gradwire::c_api {

using namespace engine_detail;

namespace {

struct FinishedExchange final : Handle::State {
  void wait() override {}
};

ErrorKind kind_of(int code) {
  for (const ErrorKind kind : {ErrorKind::usage, ErrorKind::frame, ErrorKind::mismatch, ErrorKind::io,
                               ErrorKind::unsupported, ErrorKind::device})
    if (code_of(kind) == code) return kind;
  return ErrorKind::engine;
}

gw_communicator checked(const gw_communicator& given) {
  // Programs that were compiled with an older header end before the fields that came later.
  if (given.struct_bytes < offsetof(gw_communicator, node))
    refuse_usage("struct_bytes is " + std::to_string(given.struct_bytes) + "; set it to sizeof(gw_communicator)",
                 "struct_bytes");
  gw_communicator communicator{};
  std::memcpy(&communicator, &given, std::min(given.struct_bytes, sizeof communicator));
  if (communicator.size < 1 || communicator.rank < 0 || communicator.rank >= communicator.size)
    refuse_usage("rank is " + std::to_string(communicator.rank) + " of " + std::to_string(communicator.size) +
                     "; ranks count from 0 and there is at least one",
                 "rank");
  if (communicator.size > 1) c_api::given(communicator.exchange, "exchange");
  if (communicator.node < 0)
    refuse_usage("node is " + std::to_string(communicator.node) + "; allowed are 0 (not known) and numbers above",
                 "node");
  return communicator;
}

}  // namespace

CallbackEngine::CallbackEngine(const gw_communicator& communicator) : communicator_(checked(communicator)) {}

CallbackEngine::~CallbackEngine() {
  // The callbacks of a C++ program may throw, and here nobody could be told.
  if (owned_ && communicator_.close) guarded([&] { communicator_.close(communicator_.context); });
}

Handle CallbackEngine::all_to_all(std::span<const ConstBytes> send, std::span<const Bytes> recv) {
  return exchange(all_to_all_call(size(), send, recv));
}
Handle CallbackEngine::all_gather(ConstBytes mine, std::span<const Bytes> recv) {
  return exchange(all_gather_call(size(), mine, recv));
}
Handle CallbackEngine::broadcast(Bytes data, int root) { return exchange(broadcast_call(size(), rank(), data, root)); }
Handle CallbackEngine::barrier() { return exchange(barrier_call(size())); }

std::unique_ptr<Engine> CallbackEngine::split(int) {
  throw Error(ErrorKind::unsupported, "a communicator of callbacks cannot be split", "communicator");
}

void CallbackEngine::set_timeout(std::chrono::milliseconds) {
  throw Error(ErrorKind::unsupported, "a communicator of callbacks has time-outs of its own", "timeout");
}

void CallbackEngine::poison(const std::string& why) {
  if (failure_) return;
  failure_ = poisoned(rank(), why);
  if (communicator_.abandon) guarded([&] { communicator_.abandon(communicator_.context, why.c_str()); });
}

Handle CallbackEngine::exchange(const Call& call) {
  if (failure_) failure_->raise();
  const size_t me = static_cast<size_t>(rank()), world = call.send.size();
  if (call.send[me].size() != call.recv[me].size())
    throw Error(ErrorKind::mismatch, "what this rank sends to itself is not as long as what it expects", "length",
                rank());
  copy_bytes(call.send[me], call.recv[me]);
  if (world > 1) {
    std::vector<const void*> send(world);
    std::vector<void*> recv(world);
    std::vector<size_t> send_bytes(world), recv_bytes(world);
    for (size_t p = 0; p < world; ++p) {
      if (p == me) continue;
      send[p] = call.send[p].data();
      recv[p] = call.recv[p].data();
      send_bytes[p] = call.send[p].size();
      recv_bytes[p] = call.recv[p].size();
    }
    gw_fail(GW_OK, "");  // so that the words found afterwards are the callback's own
    const int code =
        communicator_.exchange(communicator_.context, send.data(), send_bytes.data(), recv.data(), recv_bytes.data());
    if (code != GW_OK) {
      const std::string words = gw_error();
      failure_ = {kind_of(code), words.empty() ? "exchange() returned " + std::to_string(code) : words, "exchange", -1};
      failure_->raise();
    }
    traffic_.add(payload_bytes(call, rank()));
  }
  return Handle(std::make_unique<FinishedExchange>());
}

}  // namespace gradwire::c_api
