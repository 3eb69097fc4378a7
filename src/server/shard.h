// SPDX-License-Identifier: Apache-2.0
// One shard of the weights at the server, and everything that is done to it. A shard knows steps, updates and
// arithmetic; it knows nothing of connections, threads or clocks: its owner calls it from one thread at a time.
//
// Quantized Adam (arXiv 2004.14180): the server keeps x in full precision, subtracts the mean of the workers' quantised
// updates from it, and sends it down quantised. With sends_updates (the authors' Efficient-Adam) what goes down is the
// quantised change; the server keeps the residual of that quantisation, and x is the sum of what was sent: exactly what
// every worker holds. If workers want no feedback at all, the residual holds only what a worker that left has sent.
//
// Where the signature says so, updates are gradients, and the shard makes the step itself: SGD with momentum over the
// weights in full precision. So the momentum is that of all workers. It survives those that die, a worker that joins
// finds it, and it is in the checkpoint.
//
// Codecs that learn do so here (shard_learning.h): up, from the statistics of the workers whose updates count; down,
// from what this shard sends.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "feedback/residual_store.h"
#include "gradwire/runner.h"
#include "server/frame.h"
#include "server/shard_coders.h"
#include "server/signature.h"

namespace gradwire::server {

// What a shard knows about a worker.
struct WorkerProgress {
  uint64_t sequence = 0;  // of the last update that was applied
  Tally tally;            // as of that update
};

// The slot under which the tallies of all workers are summed that the server does not remember any more.
inline constexpr uint32_t kForgotten = ~0u;

// A shard as a checkpoint has it.
struct ShardSnapshot {
  uint64_t version = 0;
  double applied = 0;  // the signed sum of all updates that were applied
  std::vector<float> weights, residual;
  std::map<uint32_t, WorkerProgress> progress;  // by slot
  std::vector<std::byte> learned_up = {}, learned_down = {};
  std::vector<float> momentum = {};  // of SGD
  uint64_t skipped = 0;
};

class ServerShard {
 public:
  ServerShard(const Signature& signature, const ShardLayout& layout, bool async = false);

  bool ready() const { return ready_; }        // it has weights
  void set(std::span<const std::byte> whole);  // the first ones; Error{frame}
  void set(std::span<const float> values);
  uint64_t version() const { return version_; }  // the step that the weights are for
  ShardRole role() const { return layout_.role; }
  uint64_t elements() const { return elements_; }

  // Takes an update of the current step and keeps it until close(): UpdateStatus::none. Any other status is final. The
  // rounds of a pool do not build on each other: an update for a later round, which comes after the server was
  // restarted, makes that round the current one. Pending updates go along, except those that a worker has sent again
  // for a round that is over by this.
  UpdateStatus submit(uint32_t slot, const Frame& frame, Blob payload);
  bool has_applied(uint32_t slot, uint64_t sequence) const;  // this update, or a later one
  bool has_pending(uint32_t slot) const { return pending_.contains(slot); }
  size_t pending() const { return pending_.size(); }
  void forget(uint32_t slot);  // its tally goes to kForgotten

  // Ends the step: the pending updates are added in the order of slots, and their mean is subtracted from the weights.
  // Updates that turn out to be unreadable or not finite are left out, and named. A step in which none is left, or in
  // which nobody has sent one and a worker has said that its gradient was not finite (`not_finite`), is skipped.
  struct ClosedStep {
    std::vector<std::pair<uint32_t, UpdateStatus>> updates;  // by slot
    uint32_t contributors = 0;
    bool skipped = false;
  };
  ClosedStep close(bool not_finite = false);
  // Asynchronous mode: applies one update at once, with the weight of one of `workers`.
  UpdateStatus apply(uint32_t slot, const Frame& frame, const Blob& payload, uint32_t workers);
  void skip() { ++skipped_; }  // asynchronous mode: a worker had no finite gradient
  // Applies the residual of a worker that leaves, with the weight of one of `workers`. It is in the weights at once,
  // but workers see it from the next step on.
  UpdateStatus absorb_residual(uint32_t slot, const Frame& frame, const Blob& message, uint32_t workers);

  // What is sent to a worker that holds the weights of step `held`. Sets the flags and the tail of `frame`: what the
  // codecs of updates have learned, unless the worker has it.
  Blob message_for(uint64_t held, Frame& frame);
  uint32_t contributors() const { return contributors_; }

  std::span<const float> weights() const { return weights_; }
  const std::map<uint32_t, WorkerProgress>& progress() const { return progress_; }
  double applied() const { return applied_; }
  // Steps that changed nothing because gradients, updates or new weights were not finite. In synchronous mode they are
  // among the steps that version() counts; in asynchronous mode versions count the updates that were applied.
  uint64_t skipped() const { return skipped_; }
  ShardSnapshot snapshot() const;
  void restore(ShardSnapshot snapshot);  // Error{frame} if it does not fit
  uint64_t bytes() const;                // of memory

 private:
  struct PendingUpdate {
    Frame frame;
    Blob payload;
    bool resent;  // of a pool: by a worker that has its answer, for others that do not
  };
  // Statistics of one worker, in asynchronous mode.
  struct WorkerStatistics {
    uint32_t slot;
    std::vector<std::byte> bytes;
  };
  using DroppedUpdates = std::vector<std::pair<uint32_t, UpdateStatus>>;

  void make_room();  // for the weights and their sum: not before the first ones come
  void decode(std::span<const std::byte> message, std::vector<float>& to, Write write);
  std::vector<void*> pointers(std::vector<float>& values) const;
  std::vector<const void*> constant(std::vector<float>& values) const;
  double signed_sum_of(const std::vector<float>& values) const;
  std::span<float> residual() const;  // in the order of weights_; empty unless it sends updates
  float rate_of_step() const;
  bool subtract_mean(uint32_t divisor, float rate);
  bool descend(float divisor, float rate);
  void sum_pending();
  void drop_unusable(DroppedUpdates& dropped);
  const Blob& encoded(Blob& kept, Runner& runner);
  Blob with_learned(const Blob& message, uint64_t held, Frame& frame);
  void begin_version();
  void learn_from_pending();
  void learn_without_steps(uint32_t slot, std::span<const std::byte> statistics, uint32_t workers);
  void learn_from_weights();
  void learn(std::span<const std::span<const std::byte>> senders);

  ShardLayout layout_;
  bool sends_updates_, keeps_residual_;
  std::optional<ServerSgd> sgd_;  // of weights, not of a pool
  uint64_t seed_, elements_;
  std::vector<uint64_t> name_hashes_;
  ShardReader reader_;                     // of updates
  ShardLearning learning_;                 // of the codecs of updates
  uint64_t learned_at_ = 0;                // the version from which on they use what they learned last
  std::vector<WorkerStatistics> waiting_;  // in the order in which they came
  ShardWriter writer_;
  Plan whole_plan_;
  std::unique_ptr<Runner> whole_runner_;

  bool ready_ = false;
  uint64_t version_ = 0;
  uint32_t contributors_ = 0;
  uint64_t skipped_ = 0;
  double applied_ = 0;
  std::vector<float> weights_, sum_, momentum_;
  ResidualStore residuals_{DType::f32, Device{}};  // of what goes down: one, with the elements of weights_
  std::vector<TensorSpec> residual_ranges_;        // where each range of the layout stands in it
  std::map<uint32_t, WorkerProgress> progress_;    // by slot
  std::map<uint32_t, PendingUpdate> pending_;      // by slot
  // The messages of this version. Weights are encoded when the first worker asks for them; a change is encoded when its
  // step closes, because it is part of the arithmetic.
  Blob down_, change_, whole_;
  std::pair<Blob, Blob> tailed_;  // one of these, and the same with what was learned behind it
};

}  // namespace gradwire::server
