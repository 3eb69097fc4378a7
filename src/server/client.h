// SPDX-License-Identifier: Apache-2.0
// A worker of a parameter server. It encodes updates with the residuals of error feedback (worker_residuals.h), keeps
// what it sent until that is on the server's disk (replay_log.h), and sees to it that every update counts exactly once:
//
//   applied      it counts; it is kept until it is durable, and sent again if the server has forgotten it
//   late         its step was closed without it: it is held back, and goes out again with later updates
//
// A connection that breaks is made anew; exchange() returns when the next weights are here, however long that takes
// within `patience_s`. Codecs that learn use what the server has made of the statistics of all workers
// (shard_learning.h). A Client is not for several threads.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/clock.h"
#include "gradwire/collective.h"
#include "gradwire/runner.h"
#include "server/link.h"
#include "server/replay_log.h"
#include "server/shard_coders.h"
#include "server/signature.h"
#include "server/worker_residuals.h"

namespace gradwire::server {

struct ClientOptions {
  Signature signature;
  Dialer dial;
  std::string name;         // for people
  std::string id;           // empty: a random one
  double patience_s = 600;  // how long to go on trying to reach the server
  int threads = 1;
  bool bench = false;  // it trains nothing: only a server that was started for that takes it
};

struct ClientCounts {
  uint64_t messages_up = 0, messages_down = 0;                // bytes of messages, including those that were sent again
  uint64_t applied = 0, late = 0, corrupt = 0, replayed = 0;  // shards of updates
  uint64_t reconnects = 0;
};

class Client {
 public:
  explicit Client(ClientOptions options);
  ~Client();

  // In: the weights that this worker would begin with. Out: those to compute the first gradient at. Returns their step.
  uint64_t join(std::span<float* const> weights);
  // In: this worker's updates, without the residual, all finite. Out: the weights of the next step, which is returned.
  uint64_t exchange(std::span<const float* const> updates, std::span<float* const> weights);
  // The learning rate of the next step, for codecs that follow it and for a server that runs SGD.
  void set_rate(double rate) { rate_ = rate; }
  // A step for which this worker has nothing to send: because its gradient was not finite, which the server counts, or
  // because it only watches.
  enum class SkipReason { not_finite, watching };
  uint64_t skip(std::span<float* const> weights, SkipReason why);
  // In: second moments. Out: their mean over the workers.
  void pool(std::span<float* const> second);
  // Gives the residual to the server and waits until it is on disk; false if that was not confirmed in time.
  bool leave(double wait_s);

  void report(const nlohmann::json& text);
  bool owns_buffers() const { return owns_buffers_; }  // the server keeps the buffers of this worker
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
  std::span<const float> residual(size_t parameter) const { return residuals_.of(parameter); }
  Tally tally() const;  // of all shards

 private:
  struct ClientShard {
    ShardWriter up;             // learns: it has from the server what all workers have learned
    ShardReader refunds, down;  // of updates that come back, and of weights
    std::unique_ptr<Plan> whole_plan;
    std::unique_ptr<Runner> whole;
    uint64_t observed = 0;  // async: the step after the last one that statistics were looked for at
    uint64_t version = 0;   // the server's, as last heard
    uint64_t at = kNone;    // the step of the weights that are here
    uint64_t held = kNone;  // the same, if they came from this process of the server
    uint64_t durable = 0;
    bool asked = false;      // a request is under way
    uint64_t asked_for = 0;  // its sequence: answers with another one do not belong to it
    Tally tally;
    // Of a pool: the latest round that was heard of, whatever a restarted server says, and what this worker gave to the
    // last round that it took part in.
    uint64_t round = 0;
    Blob pooled;
    uint64_t pooled_round = 0, pooled_sequence = 0;
  };

  // The connection.
  void connect();
  void take_welcome(const nlohmann::json& text);
  void make_shards();
  void persist(const std::function<void()>& work);  // repeats it until it ends without losing the connection
  double patience_left() const;
  void send(const Frame& frame, const Blob& payload);
  void listen(std::span<float* const> weights, std::chrono::milliseconds patience);
  void handle(const Frame& frame, const Blob& payload, std::span<float* const> weights);
  void take_durable(const nlohmann::json& text);
  void take_weights(const Frame& frame, const Blob& payload, std::span<float* const> weights);
  void take_status(const Frame& frame);

  // Updates.
  void encode_shard(SentUpdate& update, size_t shard, std::span<const float* const> updates);
  void refund(SentUpdate& update, size_t shard);
  void drop_durable();
  // `flags`: of pulls.
  void ask(size_t shard, uint64_t target, bool replay = false, uint8_t flags = 0);
  void settle(uint64_t target, std::span<float* const> weights, uint8_t flags = 0);
  void send_initial(std::span<float* const> weights);
  void send_residual(uint64_t sequence);
  void resend_pooled();
  // Where the ranges of a shard begin in the caller's tensors.
  template <class Pointer>
  std::vector<Pointer> ranges_of(size_t shard, std::span<float* const> tensors) const {
    std::vector<Pointer> list;
    for (const ParameterRange& range : layouts_[shard].ranges) list.push_back(tensors[range.parameter] + range.first);
    return list;
  }

  ClientOptions options_;
  std::string id_;
  std::unique_ptr<Link> link_;
  SteadyClock::time_point connected_;
  std::vector<ShardLayout> layouts_;
  std::vector<ClientShard> shards_;
  size_t weight_shards_ = 0;
  WorkerResiduals residuals_;
  std::vector<uint64_t> name_hashes_;
  ReplayLog log_;
  uint64_t sequence_ = 0, run_ = 0, shard_elements_ = 0;
  std::optional<SteadyClock::time_point> until_;  // while it leaves: when to give up
  bool resend_pooled_ = false;                    // a restarted server may lack a round that others still wait for
  double rate_ = -1;                              // below 0: not given
  uint64_t local_step_ = 0;                       // async: this worker's own count
  uint32_t slot_ = 0;
  bool async_ = false, owns_buffers_ = false, joined_ = false, initial_ = false, gone_ = false;
  Plan buffer_plan_;
  std::unique_ptr<Runner> buffer_runner_;
  Blob buffers_;
  ClientCounts counts_;
  ReduceTimes times_;
};

}  // namespace gradwire::server
