// SPDX-License-Identifier: Apache-2.0
// Compressed collectives over any Engine and any Codec. After each, all ranks hold bit-identical results: every rank
// also decodes what it sent itself.
//
//   gather    everybody gets every message and averages the decoded tensors. What the papers do; bytes grow with W.
//   scatter   each rank owns shards: all-to-all of encoded shards, decode and add in rank order, encode the mean once
//             more, all-gather. Bytes do not grow with W. The second encoding is a one-sender problem: by default it
//             rounds to nearest and carries the owner's residual.
//
// Shards are functions of (tensor name, element index, world): how tensors are grouped into calls changes nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gradwire/engine.h"
#include "gradwire/feedback.h"

namespace gradwire {

struct NamedTensor {
  std::string name;
  uint64_t count = 0;
  DType dtype = DType::f32;
  int dimensions = 2;  // for the rule `1d`
};

// A part of a tensor and the rank that owns it.
struct Shard {
  size_t tensor;   // index in the caller's list
  uint64_t first;  // element
  uint64_t count;
  int owner;
};

// Large tensors are cut at multiples of kPieceGrain and dealt over the ranks; small ones go whole to an owner by name.
std::vector<Shard> shards(std::span<const NamedTensor> tensors, int world);

struct ReduceOptions {
  enum class Method { gather, scatter };
  enum class Op { mean, sum };
  enum class Feedback { codec, on, off };  // codec: as the codec's traits say
  Method method = Method::scatter;
  Op op = Op::mean;
  std::string up = "qsgd:bits=4";  // a spec or rules
  std::string down = {};           // scatter; empty: as up, rounded to nearest where the codec can
  Feedback feedback = Feedback::codec;
  Feedback owner_feedback = Feedback::on;
  DType residual = DType::f32;
  uint64_t seed = 0;
  // Where tensors, residuals and sums live and codecs run; ranks may differ in it, results do not. On a GPU all
  // pointers are device pointers and work is enqueued on device.stream: whatever writes the inputs must come before it
  // there when the call is made. Outputs are complete when the call, or the handle's wait(), returns. Ranks that are
  // threads of one process want a stream each: on the default stream, which null means, they would wait for each other.
  Device device = {};
};

// Where a rank's time went, in seconds. encode and decode are processor time of the thread that does the work where the
// CPU does it alone, and wall time where others help it (device.threads > 1, or a GPU). What is learned counts as
// encode, adding up and dividing as decode. wait: wall time in the engine, for peers and for bytes.
struct ReduceTimes {
  double encode = 0, wait = 0, decode = 0;
};

// Bytes held, on the host and on the device together.
struct ReduceMemory {
  uint64_t residuals = 0;  // both copies
  uint64_t messages = 0;   // sent and received, and what they pass through on the way to a GPU
  uint64_t sums = 0;       // f32 values that cannot stand in the outputs
};

// All-reduce of a fixed list of tensors, step after step. Construction is collective: ranks exchange a signature of
// (names, counts, dtypes, specs, method) and are told, before data move, who disagrees about what.
class Reducer {
 public:
  Reducer(Engine& engine, std::vector<NamedTensor> tensors, const ReduceOptions& options);
  ~Reducer();

  // in[i], out[i] hold tensors[i]; they may be the same memory. Runs on a thread of its own, shared by all reducers on
  // the engine, in the order of the calls; the handle's wait() throws what went wrong. A step that failed has changed
  // no residual. Where only one rank's arguments are wrong, or ranks disagree about step or loss_scale, all are told
  // before data move, and can go on; any later failure poisons the engine.
  Handle start(uint64_t step, std::span<const void* const> in, std::span<void* const> out, float loss_scale = 1.0f);
  void run(uint64_t step, std::span<const void* const> in, std::span<void* const> out, float loss_scale = 1.0f);

  // After the results are seen (all ranks see the same bits, so all decide alike). A reducer that keeps residuals
  // refuses another step until this one is decided.
  void commit(uint64_t step);
  void rollback(uint64_t step);

  // Codecs that learn (learn.h) do so by themselves: evidence is gathered from all ranks after a step, and what was
  // learned is kept in feedback() as notes, so that it is saved and restored with the residuals.
  void set_rate(double rate);                  // the learning rate of the steps to come, for codecs that follow it
  std::vector<Codec> codecs(Side side) const;  // of the last step, per tensor, with what they had learned

  // A state to go on with is assigned to it; it must have been loaded for the device of the options.
  ErrorFeedback& feedback();
  uint64_t message_bytes() const;  // bytes this rank sends to others in the last step, or the first one, evidence aside
  ReduceTimes times() const;       // of all steps so far; waits, as memory() does, until the steps started have run
  ReduceMemory memory() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The halves alone, on one tensor list each (what FSDP needs). Options: up codec for reduce_scatter, down for
// all_gather. reduce_scatter: out holds this rank's shards, in the order of shards(), back to back, as f32.
void reduce_scatter(Engine& engine, std::span<const NamedTensor> tensors, const ReduceOptions& options, uint64_t step,
                    std::span<const void* const> in, std::span<float> out, ErrorFeedback* feedback = nullptr);
void all_gather(Engine& engine, std::span<const NamedTensor> tensors, const ReduceOptions& options, uint64_t step,
                std::span<const float> mine, std::span<void* const> out, ErrorFeedback* feedback = nullptr);
// The root's tensors reach everybody, the root's own copy included, as the codec `down` (or up, if empty) leaves them.
void broadcast(Engine& engine, std::span<const NamedTensor> tensors, const ReduceOptions& options, uint64_t step,
               int root, std::span<void* const> tensors_data, ErrorFeedback* feedback = nullptr);

}  // namespace gradwire
