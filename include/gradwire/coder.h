// SPDX-License-Identifier: Apache-2.0
// The coding of an all-reduce without an engine, for callers who move the bytes themselves: torch.distributed, or
// anything else that moves byte buffers. A Reducer is this coding and an Engine, so both give the same bits.
//
//   ModelCoder    all tensors of a model: residuals by name, what the codecs learn, the step and whether it is finite
//   BucketCoder   some of these tensors (a bucket), coded together. How tensors are grouped into buckets changes no
//                 value and no residual, and may differ from step to step
//
//   model.begin(step, {});
//   for each bucket:  bucket.begin();
//                     bucket.encode_up(in, send);      // ... all-to-all: slot p of send goes to rank p
//                     bucket.decode_up(recv);
//                     bucket.encode_down(mine);        // ... all-gather
//                     bucket.decode_down(recv, out);
//   model.end();                                       // commits the step if all results are finite
//
// A buffer holds one slot per rank, back to back. Slots are multiples of 16 bytes, so that every message is aligned; on
// the way down they have one size if that costs little, so that an all-gather can move them. On a GPU buffers and
// tensors are device memory, and after the first steps no call waits: a damaged message decodes to NaN, and a later
// call throws.
//
// Threads: BucketCoder::begin() and encode_up() belong to one thread, decode_up() and encode_down() to another,
// decode_down() and ModelCoder::end() to a third, or fewer; each thread takes the buckets in the same order.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/collective.h"

namespace gradwire {

struct CoderOptions {
  // all_reduce is what a Reducer does. The other two have one direction only; there tensor i belongs whole to rank
  // i % world, and the values of all_gather have the tensors' own type.
  enum class Kind { all_reduce, reduce_scatter, all_gather };
  Kind kind = Kind::all_reduce;
  ReduceOptions reduce;  // method, codecs, feedback, seed, device
  int rank = 0;
  int world = 1;
};

struct StepOptions {
  float loss_scale = 1.0f;
  double rate = -1;    // the learning rate, for codecs that follow it; below 0: not given
  bool exact = false;  // warm-up: every tensor is sent as fp32, its residual included
};

class ModelCoder {
 public:
  ModelCoder(std::vector<NamedTensor> tensors, const CoderOptions& options);
  ~ModelCoder();
  ModelCoder(const ModelCoder&) = delete;
  ModelCoder& operator=(const ModelCoder&) = delete;

  // What must be equal on all ranks, as (field, text), for the caller to compare.
  std::vector<std::pair<std::string, std::string>> handshake() const;

  // A step that was begun and not ended is abandoned.
  void begin(uint64_t step, const StepOptions& how);
  // More f32 values that must be finite, or the open step changes nothing. After a reduce_scatter a rank sees only its
  // own shard, so ranks that are to decide alike must exchange a value that tells. NaNs become the NaN of a CPU.
  void check_finite(std::span<float> values);
  // Commits the step if all results are finite; else no residual changes. On a GPU it uses the stream of the options.
  void end();
  void abandon();  // the open step changes nothing

  // What codecs learn from a step, after its end and before the next begin: the caller gathers the statistics of all
  // ranks, in rank order, and learn() takes them. 0 bytes: this step teaches nothing. On a GPU stats_bytes() and
  // take_stats() wait for the step; a thread of its own may do all this while the next step is computed.
  bool learns() const;   // whether there ever is something to learn
  bool teaches() const;  // whether the open step teaches something
  size_t stats_bytes() const;
  void take_stats(std::span<std::byte> out);
  void learn(std::span<const std::byte> all_ranks);

  // From the next step on this tensor is sent as fp32, up and down.
  void exempt(size_t tensor);

  bool divisible(size_t tensor) const;                   // into parts: its codecs work on less than the whole tensor
  std::vector<Codec> codecs(Direction direction) const;  // per tensor, of the step
  ErrorFeedback& feedback();                             // to read; what was learned is its extra state
  void restore(ErrorFeedback&& state);
  std::vector<std::string> plans() const;  // what codecs plan with, a line each; empty where none does
  uint64_t skipped() const;                // steps whose results were not finite; waits for a GPU
  const std::vector<NamedTensor>& tensors() const;

 private:
  friend class BucketCoder;
  struct State;
  std::unique_ptr<State> state_;
};

class BucketCoder {
 public:
  // `tensors`: indices in the model's list. `device` names the stream of this bucket. The model must outlive it. With
  // `parts` above 1 the bucket holds part number `part` of every owner's shards, for large tensors that should not be
  // sent as one (see ModelCoder::divisible). A step must have all parts.
  BucketCoder(ModelCoder& model, std::vector<size_t> tensors, const Device& device, uint64_t part = 0,
              uint64_t parts = 1);
  ~BucketCoder();
  BucketCoder(const BucketCoder&) = delete;
  BucketCoder& operator=(const BucketCoder&) = delete;

  // Takes the codecs and residuals of the model's open step. idle[i]: the i-th tensor of this bucket is all zeros on
  // all ranks and its result will be dropped, so its residual stays.
  void begin(std::span<const uint8_t> idle = {});

  // On a GPU whose Device has a clock, what encode_up to decode_down enqueue after begin() may be recorded as a CUDA
  // graph and run again in a later step, where both steps have the same signature, the calls are given the same
  // addresses, and the model teaches() nothing in either. Two steps have the same signature on all ranks or on none.
  // poll() then throws what is known of damaged messages.
  uint64_t signature() const;
  void poll();

  // Bytes of every slot, after begin().
  const std::vector<size_t>& up_send() const;    // [p]: for rank p
  const std::vector<size_t>& up_recv() const;    // [p]: from rank p
  const std::vector<size_t>& down_recv() const;  // [p]: from owner p; scatter only, empty for gather

  // The tensors' order is that of the constructor.
  void encode_up(std::span<const void* const> in, std::span<std::byte> send);
  // Decodes this rank's own messages as other ranks will see them, for measurements.
  void decode_own(std::span<const std::byte> send, std::span<void* const> out);
  // Adds the messages of all ranks and divides. With scatter the means are kept for encode_down. With gather `out` gets
  // the results, with reduce_scatter those of this rank's own tensors.
  void decode_up(std::span<const std::byte> recv, std::span<void* const> out = {});
  // The means that decode_up kept, exact as they are before encode_down rounds them, at their places in whole tensors.
  // Elements whose owner is another rank are left alone. Null: not wanted; the others must be tensors of f32.
  void read_means(std::span<void* const> out);
  // Encodes what decode_up kept; with all_gather `values`, those of this rank's own tensors.
  void encode_down(std::span<std::byte> mine, std::span<const void* const> values = {});
  void decode_down(std::span<const std::byte> recv, std::span<void* const> out);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradwire
