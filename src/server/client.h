// SPDX-License-Identifier: Apache-2.0
// A worker of a parameter server. It holds the residuals of error feedback, encodes updates, keeps what it sent until that
// is on the server's disk, and sees to it that every update counts exactly once:
//
//   applied      it counts; kept until it is durable, and sent again if the server has forgotten it
//   late         its step was closed without it: it goes back into the residual, and out again with later updates
//
// A connection that breaks is made anew; exchange() returns when the next weights are here, however long that takes within
// `patience_s`. Not for several threads.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gradwire/collective.h"
#include "gradwire/runner.h"
#include "server/link.h"
#include "server/signature.h"

namespace gradwire::server {

struct ClientOptions {
  Signature signature;
  Dialer dial;
  std::string name;         // for people
  std::string id;           // empty: a random one
  double patience_s = 600;  // how long to go on trying to reach the server
  int threads = 1;
};

struct ClientCounts {
  uint64_t messages_up = 0, messages_down = 0;                                // bytes of messages, replays included
  uint64_t applied = 0, late = 0, corrupt = 0, replayed = 0, reconnects = 0;  // parts, except the last
};

class Client {
 public:
  explicit Client(ClientOptions options);
  ~Client();

  // In: the weights that this worker would begin with. Out: those to compute the first gradient at. Returns their step.
  uint64_t join(std::span<float* const> weights);
  // This worker's updates, without residual, finite. Out: the weights of the next step, which is returned.
  uint64_t exchange(std::span<const float* const> updates, std::span<float* const> weights);
  uint64_t skip(std::span<float* const> weights);  // nothing to send in this step
  // Second moments in, their mean over the workers out.
  void pool(std::span<float* const> second);
  // Hands what it still owes to the server and waits until that is on disk; false if that could not be seen in time.
  bool leave(double wait_s);

  void report(const nlohmann::json& text);
  bool keeper() const { return keeper_; }  // the worker whose buffers the server wants
  void send_buffers(std::span<const float* const> buffers);
  // The server's, if it had any when this worker joined: false if not.
  bool take_buffers(std::span<float* const> buffers) const;

  uint32_t slot() const { return slot_; }
  const std::string& id() const { return id_; }
  uint64_t step() const;
  double bits() const;  // per element sent up
  const ClientCounts& counts() const { return counts_; }
  ReduceTimes times() const { return times_; }
  ReduceMemory memory() const;
  std::span<const float> residual(size_t parameter) const { return residuals_[parameter]; }
  Tally tally() const;  // of all parts

 private:
  enum class State : uint8_t { open, applied, folded };
  struct Sent {  // one part of an update
    State state = State::open;
    uint64_t step = 0, settled_at = 0;
    Blob message;
    Tally tally;
  };
  struct Entry {
    uint64_t sequence;
    std::vector<Sent> parts;
  };
  struct PartSide {
    std::unique_ptr<Plan> up_plan, down_plan, whole_plan;
    std::unique_ptr<Runner> up, down, whole;
    uint64_t version = 0;   // the server's, as last heard
    uint64_t at = kNone;    // of the weights that are here
    uint64_t held = kNone;  // the same, as far as this server knows them
    uint64_t durable = 0;
    bool asked = false;      // a request is under way
    uint64_t asked_for = 0;  // its sequence: answers to others are none to it
    Tally tally;
    uint64_t round = 0;  // of a pool: the latest that was heard of, whatever a restarted server says
    Blob pooled;         // what this worker gave to the round before
    uint64_t pooled_round = 0, pooled_sequence = 0;
  };

  void connect();
  void greet(const nlohmann::json& text);
  void cut();
  template <class Work>
  void persist(const Work& work);  // until it ends without losing the connection
  void settle(uint64_t target, std::span<float* const> weights);
  void ask(size_t part, uint64_t target, bool replay = false);
  void handle(const Frame& frame, const Blob& payload, std::span<float* const> weights);
  void encode_part(Entry& entry, size_t part, std::span<const float* const> updates);
  void fold(Entry& entry, size_t part);
  void forget_durable();
  void send_initial(std::span<float* const> weights);
  void listen(std::span<float* const> weights, std::chrono::milliseconds patience);  // handles what comes
  void pool_again();
  double patience_left() const;
  void send(const Frame& frame, const Blob& payload);
  template <class Pointer>
  std::vector<Pointer> pieces(size_t part, std::span<float* const> tensors) const;
  std::vector<float*> residual_pointers();
  double residual_sum(size_t part) const;
  Entry* oldest_open(size_t part);

  ClientOptions options_;
  std::string id_;
  std::unique_ptr<Link> link_;
  std::chrono::steady_clock::time_point connected_;
  std::vector<Cut> cuts_;
  std::vector<PartSide> sides_;
  size_t weight_parts_ = 0;
  std::vector<std::vector<float>> residuals_, next_residuals_;  // a parameter each
  std::vector<uint64_t> name_hashes_;
  std::deque<Entry> log_;
  uint64_t sequence_ = 0, run_ = 0, part_elements_ = 0;
  std::optional<std::chrono::steady_clock::time_point> until_;  // of one who leaves
  bool pool_again_ = false;  // a restarted server may lack what others still wait for
  uint64_t local_step_ = 0;  // without steps: this worker's own count
  uint32_t slot_ = 0;
  bool async_ = false, keeper_ = false, joined_ = false, initial_ = false, gone_ = false;
  Plan buffer_plan_;
  std::unique_ptr<Runner> buffer_runner_;
  Blob buffers_;
  ClientCounts counts_;
  ReduceTimes times_;
};

}  // namespace gradwire::server
