// SPDX-License-Identifier: Apache-2.0
// Compressed collectives over any Engine and any Codec. After each, all ranks hold bit-identical results: every rank
// also decodes what it sent itself.
//
//   all_reduce(engine, gradient, "qsgd:bits=4");              // one call: the mean over all ranks, in place
//
//   Reducer reducer(engine, {{"weight", n}}, {.up = "qsgd:bits=4"});     // step after step, with error feedback
//   for (uint64_t step = 0; step < steps; ++step) reducer.run(step, gradient, mean);
//
// There are two methods:
//
//   gather    every rank gets the messages of all ranks and averages the decoded tensors. This is what the papers do;
//             the bytes grow with the number of ranks.
//   scatter   every rank owns shards: an all-to-all of encoded shards, decode and add in rank order, encode the mean
//             once more, all-gather. The bytes do not grow with the number of ranks. The second encoding has one
//             sender, so by default it rounds to nearest and feeds the owner's residual back.
//
// Shards are functions of (tensor name, element index, number of ranks): how tensors are grouped into calls changes
// nothing.
//
// Ranks of one node mostly have a fast link to each other, and share a slow one to other nodes. ReduceOptions::nodes
// makes a reduction of two levels: every tensor is cut into pieces, one for each place in a node. Within a node the
// tensors are reduced plainly, piece p to the rank with place p. The ranks with the same place in all nodes then reduce
// their piece as above, compressed, with nodes for ranks. Within a node the results are gathered plainly.
//
// Threads: every rank calls from one thread. A Reducer belongs to the thread that made it; its steps run on a thread of
// their own, which all reducers on one engine share.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gradwire/engine.h"
#include "gradwire/feedback.h"
#include "gradwire/rules.h"

namespace gradwire {

struct NamedTensor {
  std::string name;
  uint64_t count = 0;
  DType dtype = DType::f32;
  int dimensions = 2;  // for the rules `1d` and `2d`
  uint64_t rows = 0;   // for lowrank: the first extent of a tensor of two dimensions or more; 0: not known
};

// A run of elements of a tensor, and the rank that owns it.
struct Shard {
  size_t tensor;   // index in the caller's list
  uint64_t first;  // element
  uint64_t count;
  int owner;
};

// Large tensors are cut at multiples of kTileElements and spread over the ranks; a small one goes whole to the owner
// that follows from its name.
std::vector<Shard> shards(std::span<const NamedTensor> tensors, int world);

struct ReduceOptions {
  enum class Method { gather, scatter };
  enum class Op { mean, sum };
  // codec: as the codec's traits say; momentum: the same where the tensors are Adam's momentum (Traits::momentum)
  enum class Feedback { codec, on, off, momentum };
  enum class Commit { if_finite, manual };
  Method method = Method::scatter;
  Op op = Op::mean;
  std::string up = "qsgd:bits=4";  // a spec or rules (rules.h)
  std::string down = {};           // scatter only; empty: as up, rounded to nearest where the codec can
  Feedback feedback = Feedback::codec;
  Feedback owner_feedback = Feedback::on;  // scatter: of the second encoding
  DType residual = DType::f32;             // f32 or bf16
  // Above 0, to 1: what is left of a residual when it is added to the next step, in both directions. 1: all of it.
  float decay = 1.0f;
  uint64_t seed = 0;
  // if_finite: a step commits itself if all of its results are finite. All ranks hold the same results, so they decide
  // alike; a step with a NaN or an Inf changes no residual and teaches no codec. manual: the caller decides on every
  // step with commit(step) or rollback(step), for example because several reducers belong to one step.
  Commit commit = Commit::if_finite;
  // The length of the run, for codecs that plan with it (dqsgd); 0: not known.
  uint64_t steps = 0;
  // 0: one level. Above 0: two levels, and so many nodes of equally many consecutive ranks. kAutoNodes: two levels, and
  // ranks that share a machine share a node (MPI_Comm_split_type over MPI; loopback is one node). Nodes of different
  // sizes are refused. With one rank in each node there is one level; with one node nothing is compressed.
  static constexpr int kAutoNodes = -1;
  int nodes = 0;
  // Several reducers may carry a model, some tensors each. If all of them are given all of its tensors here, they learn
  // as one: Reducer::learn_together(). Commit::manual only, since the step is decided for all of them.
  std::vector<NamedTensor> model = {};
  // Where tensors, residuals and sums are and codecs run. Ranks may differ in it; the results do not. On a GPU all
  // pointers are device pointers and work is enqueued on device.stream: what writes the inputs must be enqueued there
  // before the call. Outputs are complete when the call, or the handle's wait(), returns. Ranks that are threads of one
  // process need a stream each: on the default stream, which null means, they would wait for each other.
  Device device = {};
};

// Where the time of a rank went, in seconds. encode and decode are processor time of the thread that does the work if
// it works alone, and wall time if other threads (device.threads > 1) or a GPU help it. Learning counts as encode;
// adding, dividing and the check for finite results count as decode. wait is wall time in the engine, for peers and for
// bytes.
struct ReduceTimes {
  double encode = 0, wait = 0, decode = 0;
};

// Bytes held, on the host and on the device together.
struct ReduceMemory {
  uint64_t residuals = 0;  // both copies
  // Sent and received, and the buffers between host and GPU. On two levels also what ranks of a node send each other,
  // about twice the tensors.
  uint64_t messages = 0;
  uint64_t sums = 0;  // f32 sums that do not fit in the outputs
};

// All-reduce of a fixed list of tensors, step after step. Construction is collective: ranks compare (names, counts,
// dtypes, codecs, options), and an Error{mismatch} names the rank and the field that differ before any data move.
// Options without a meaning, such as a down codec for the method gather, are refused by name.
class Reducer {
 public:
  using FloatInputs = std::span<const std::span<const float>>;
  using FloatOutputs = std::span<const std::span<float>>;

  Reducer(Engine& engine, std::vector<NamedTensor> tensors, const ReduceOptions& options);  // engine must outlive it
  ~Reducer();

  // Tensor i of the list is read from in[i] and its result written to out[i]; they may be the same memory, and must
  // stay until the handle's wait() returns. Spans of floats are for tensors that are all f32, and their sizes are
  // checked; pointers are for any type. Steps run in the order of the calls; wait() throws what went wrong. A step that
  // failed has changed no residual. If only one rank's arguments are wrong, or ranks disagree about step or loss_scale,
  // all ranks are told before data move, and can go on; any later failure poisons the engine.
  Handle start(uint64_t step, std::span<const void* const> in, std::span<void* const> out, float loss_scale = 1.0f);
  Handle start(uint64_t step, FloatInputs in, FloatOutputs out, float loss_scale = 1.0f);
  // start() and wait().
  void run(uint64_t step, std::span<const void* const> in, std::span<void* const> out, float loss_scale = 1.0f);
  void run(uint64_t step, FloatInputs in, FloatOutputs out, float loss_scale = 1.0f);
  void run(uint64_t step, std::span<const float> in, std::span<float> out, float loss_scale = 1.0f);  // of one tensor

  // The reducers of one model (ReduceOptions::model) learn from a step that all of them have finished, before it is
  // committed. Tensors with the same codec have the same table then, whichever reducer carries them. Collective.
  static void learn_together(std::span<Reducer* const> reducers, uint64_t step);

  // With Commit::manual, after the results are seen. All ranks must decide alike. A reducer that keeps residuals
  // refuses another step until this one is decided. With Commit::if_finite both are refused.
  void commit(uint64_t step);
  void rollback(uint64_t step);
  // Steps that were not committed because a result was not finite. Without residuals and codecs that learn there is
  // nothing to commit, and results are not checked.
  uint64_t skipped() const;

  // Codecs that learn (learn.h) do so by themselves: statistics are gathered from all ranks after a step, and what was
  // learned is kept in feedback() as extra state, so that it is saved and restored with the residuals.
  void set_rate(double rate);  // the learning rate of the steps to come, for codecs that follow it
  // Of the last step, per tensor, with what they had learned. Of lowrank it is the codec of its factors.
  std::vector<Codec> codecs(Direction direction) const;
  // What the codes of each tensor take in a step; of lowrank with alternate=on the mean of two steps.
  std::vector<uint64_t> encoded_bytes(Direction direction) const;

  // To restore a saved state, assign it to this; it must have been loaded for the device of the options, and be of the
  // same ranks and nodes, or have been made for them by redistribute().
  ErrorFeedback& feedback();
  // Which of the states that redistribute() makes belongs to this rank: they stand node after node. It is the rank,
  // unless kAutoNodes has found nodes whose ranks are not consecutive.
  int position() const;
  uint64_t message_bytes() const;  // that this rank sends to others in the last step, or the first; without statistics
  uint64_t node_bytes() const;     // of these, those that leave the node. On one level every rank is a node
  ReduceTimes times() const;       // of all steps so far; waits, as memory() does, until the steps started have run
  ReduceMemory memory() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The mean of `data` over all ranks (or the sum, by the options), in place, in one call. Nothing is kept between calls,
// so there is no error feedback: an option that asks for it is refused. The random bits of a codec follow from `step`.
void all_reduce(Engine& engine, std::span<float> data, const std::string& codec, uint64_t step = 0);
void all_reduce(Engine& engine, std::span<float> data, const ReduceOptions& options, uint64_t step = 0);

// The two directions by themselves, each on one list of tensors, as FSDP needs them: the up codec is for
// reduce_scatter, the down codec for all_gather. The caller owns the residuals and decides on the step; after an error
// it must roll it back. The output of reduce_scatter holds this rank's shards, in the order of shards(), back to
// back, as f32.
void reduce_scatter(Engine& engine, std::span<const NamedTensor> tensors, const ReduceOptions& options, uint64_t step,
                    std::span<const void* const> in, std::span<float> out, ErrorFeedback* feedback = nullptr);
void all_gather(Engine& engine, std::span<const NamedTensor> tensors, const ReduceOptions& options, uint64_t step,
                std::span<const float> mine, std::span<void* const> out, ErrorFeedback* feedback = nullptr);
// The root's tensors reach all ranks, the root included, as the codec `down` (or up, if that is empty) leaves them.
void broadcast(Engine& engine, std::span<const NamedTensor> tensors, const ReduceOptions& options, uint64_t step,
               int root, std::span<void* const> tensors_data, ErrorFeedback* feedback = nullptr);

}  // namespace gradwire
