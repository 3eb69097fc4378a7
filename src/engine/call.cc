// SPDX-License-Identifier: Apache-2.0
// Calls, offers and the words of everything that can go wrong between ranks. The words are made here, once, so that
// every engine and every rank says the same.
#include "engine/call.h"

#include <fmt/format.h>

#include <cstring>

namespace gradwire::engine_detail {

namespace {

void check_spans(const char* field, size_t spans, int world) {
  if (spans != static_cast<size_t>(world)) {
    throw Error(ErrorKind::usage,
                fmt::format("{} holds {} spans; the engine has {} ranks and needs one each", field, spans, world),
                field);
  }
}

std::string describe(Code code, int root) {
  switch (code) {
    case Code::all_to_all:
      return "all_to_all";
    case Code::all_gather:
      return "all_gather";
    case Code::broadcast:
      return fmt::format("broadcast from root {}", root);
    case Code::barrier:
      return "barrier";
    case Code::split:
      return "split";
  }
  return fmt::format("an unknown operation ({})", static_cast<uint32_t>(code));
}

}  // namespace

Call all_to_all_call(int world, std::span<const ConstBytes> send, std::span<const Bytes> recv) {
  check_spans("send", send.size(), world);
  check_spans("recv", recv.size(), world);
  return {.code = Code::all_to_all, .send = {send.begin(), send.end()}, .recv = {recv.begin(), recv.end()}};
}

Call all_gather_call(int world, ConstBytes mine, std::span<const Bytes> recv) {
  check_spans("recv", recv.size(), world);
  const size_t ranks = static_cast<size_t>(world);
  return {.code = Code::all_gather, .send = std::vector<ConstBytes>(ranks, mine), .recv = {recv.begin(), recv.end()}};
}

Call broadcast_call(int world, int rank, Bytes data, int root) {
  if (root < 0 || root >= world) {
    throw Error(ErrorKind::usage, fmt::format("root is {}; the engine has ranks 0 to {}", root, world - 1), "root");
  }
  Call call = barrier_call(world);
  call.code = Code::broadcast;
  call.root = root;
  if (rank != root) {
    call.recv[root] = data;
    return call;
  }
  for (int p = 0; p < world; ++p) {
    if (p != root) call.send[p] = data;
  }
  return call;
}

Call barrier_call(int world) {
  const size_t ranks = static_cast<size_t>(world);
  return {.code = Code::barrier, .send = std::vector<ConstBytes>(ranks), .recv = std::vector<Bytes>(ranks)};
}

std::chrono::milliseconds checked_timeout(std::chrono::milliseconds timeout) {
  // Above a year, adding it to a clock might overflow; nobody means it.
  if (timeout.count() <= 0 || timeout > std::chrono::hours(24 * 365)) {
    throw Error(ErrorKind::usage, fmt::format("timeout is {} ms; allowed is 1 ms to one year", timeout.count()),
                "timeout");
  }
  return timeout;
}

uint64_t payload_bytes(const Call& call, int rank) {
  uint64_t bytes = 0;
  for (size_t p = 0; p < call.send.size(); ++p) {
    if (static_cast<int>(p) != rank) bytes += call.send[p].size();
  }
  return bytes;
}

void copy_bytes(ConstBytes from, Bytes to) {
  if (from.data() != to.data() && !from.empty()) std::memmove(to.data(), from.data(), from.size());
}

Offer offer_to(const Call& call, int peer) {
  return {.code = call.code, .root = call.root, .sends = call.send[peer].size(), .expects = call.recv[peer].size()};
}

std::string describe(Code code, int root, uint64_t sequence) {
  return fmt::format("{} (operation {})", describe(code, root), sequence);
}

std::optional<EngineFailure> compare(uint64_t sequence, int a, const Offer& from_a, int b, const Offer& from_b) {
  if (a > b) return compare(sequence, b, from_b, a, from_a);
  if (from_a.code != from_b.code || from_a.root != from_b.root) {
    return EngineFailure{
        ErrorKind::mismatch,
        fmt::format("rank {} started {} as operation {} where rank {} started {}", b,
                    describe(from_b.code, from_b.root), sequence, a, describe(from_a.code, from_a.root)),
        "operation", b};
  }
  const auto unequal = [&](int sender, uint64_t sent, int receiver, uint64_t expected) {
    return EngineFailure{ErrorKind::mismatch,
                         fmt::format("rank {} sends {} bytes to rank {} in {}, which expects {} bytes", sender, sent,
                                     receiver, describe(from_a.code, from_a.root, sequence), expected),
                         "length", sender};
  };
  if (from_a.sends != from_b.expects) return unequal(a, from_a.sends, b, from_b.expects);
  if (from_b.sends != from_a.expects) return unequal(b, from_b.sends, a, from_a.expects);
  return std::nullopt;
}

EngineFailure timed_out(int rank, const char* did_not, const std::string& operation,
                        std::chrono::milliseconds timeout) {
  const double seconds = std::chrono::duration<double>(timeout).count();
  return {ErrorKind::engine, fmt::format("rank {} did not {} {} within {:g} s", rank, did_not, operation, seconds),
          kTimeout, rank};
}

EngineFailure left(int rank, const std::string& operation) {
  return {ErrorKind::engine, fmt::format("rank {} left (its engine was destroyed) before {}", rank, operation), kLeft,
          rank};
}

EngineFailure poisoned(int rank, const std::string& why) {
  return {ErrorKind::engine, fmt::format("rank {} poisoned the engine: {}", rank, why), kPoison, rank};
}

EngineFailure inherited(const EngineFailure& parent, std::span<const int> group) {
  EngineFailure failure = parent;
  failure.text = "in the engine this one was split from: " + parent.text;
  failure.rank = -1;
  for (size_t i = 0; i < group.size(); ++i) {
    if (group[i] == parent.rank) failure.rank = static_cast<int>(i);
  }
  return failure;
}

std::vector<int> group_of(std::span<const int> colours, int rank) {
  std::vector<int> group;
  for (size_t p = 0; p < colours.size(); ++p) {
    if (colours[p] == colours[rank]) group.push_back(static_cast<int>(p));
  }
  return group;
}

}  // namespace gradwire::engine_detail
