// SPDX-License-Identifier: Apache-2.0
// What all engines share before bytes move.
//
// A Call is one rank's side of an operation: its code, its root, and one span per rank in each direction. An Offer is
// what a rank tells another one about its call: code, root, how many bytes it sends there and how many it expects from
// there. Two ranks agree when their offers fit; compare() says in words why they do not, in the same words whichever
// of the two asks, so that both find out without asking each other. An EngineFailure is the reason why an engine is
// poisoned. Traffic counts the payload bytes of a rank, and adds them to the engine it was split from too.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gradwire/engine.h"
#include "gradwire/error.h"

namespace gradwire::engine_detail {

enum class Code : uint32_t { all_to_all, all_gather, broadcast, barrier, split };

struct Call {
  Code code = Code::barrier;
  int root = -1;
  int colour = 0;                // split
  std::vector<ConstBytes> send;  // send[p] goes to rank p; empty where nothing goes
  std::vector<Bytes> recv;       // recv[p] comes from rank p
};

// These refuse arguments that are wrong on this rank alone with Error{usage}; nothing has been started then.
Call all_to_all_call(int world, std::span<const ConstBytes> send, std::span<const Bytes> recv);
Call all_gather_call(int world, ConstBytes mine, std::span<const Bytes> recv);
Call broadcast_call(int world, int rank, Bytes data, int root);
Call barrier_call(int world);
std::chrono::milliseconds checked_timeout(std::chrono::milliseconds timeout);

uint64_t payload_bytes(const Call& call, int rank);  // to other ranks

// Copies from one span to the other, of the same size; they may be the same memory (an all_gather in place).
void copy_bytes(ConstBytes from, Bytes to);

struct Offer {
  Code code = Code::barrier;
  int root = -1;
  uint64_t sends = 0;
  uint64_t expects = 0;
};

Offer offer_to(const Call& call, int peer);

// The field() of an Error{engine} says what kind of failure it was.
inline constexpr const char* kTimeout = "timeout";  // a rank did not come
inline constexpr const char* kLeft = "left";        // a rank destroyed its engine
inline constexpr const char* kPoison = "poison";    // a rank called poison()
inline constexpr const char* kMpi = "mpi";          // an MPI call failed

// Kept as plain fields rather than as an Error: every rank throws an exception of its own.
struct EngineFailure {
  ErrorKind kind = ErrorKind::engine;
  std::string text;
  std::string field;
  int rank = -1;

  [[noreturn]] void raise() const { throw Error(kind, text, field, rank); }
};

std::string describe(Code code, int root, uint64_t sequence);  // "broadcast from root 0 (operation 12)"
std::optional<EngineFailure> compare(uint64_t sequence, int a, const Offer& from_a, int b, const Offer& from_b);
EngineFailure timed_out(int rank, const char* did_not, const std::string& operation, std::chrono::milliseconds timeout);
EngineFailure left(int rank, const std::string& operation);
EngineFailure poisoned(int rank, const std::string& why);
// The parent's failure in the words of a sub-engine whose rank i is the parent's rank group[i].
EngineFailure inherited(const EngineFailure& parent, std::span<const int> group);

// The ranks with the same colour as `rank`, in ascending order.
std::vector<int> group_of(std::span<const int> colours, int rank);

class Traffic {
 public:
  explicit Traffic(std::shared_ptr<Traffic> parent = nullptr) : parent_(std::move(parent)) {}
  void add(uint64_t bytes) {
    for (Traffic* t = this; t != nullptr; t = t->parent_.get()) t->bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> bytes_{0};
  std::shared_ptr<Traffic> parent_;
};

inline constexpr std::chrono::milliseconds kDefaultTimeout{60'000};

}  // namespace gradwire::engine_detail
