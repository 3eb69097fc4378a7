// SPDX-License-Identifier: Apache-2.0
// An all-reduce whose bytes somebody else carries: torch.distributed, or whatever else moves byte buffers. The coding
// is the Reducer's, bit for bit; the caller moves messages between encode and decode.
//
//   RelayModel   all tensors of a model: residuals by name, what the codecs learn, the step and its verdict
//   Relay        some of these tensors (a bucket), coded together. Which ones are together changes no value and no
//                residual, and may change from step to step
//
//   model.begin(step, {});
//   for each bucket:  relay.begin();
//                     relay.encode_up(in, send);      // ... all-to-all: slot p of send goes to rank p
//                     relay.decode_up(recv);
//                     relay.encode_down(mine);        // ... all-gather
//                     relay.decode_down(recv, out);
//   model.end();                                      // a NaN or an Inf in any result: the step changes no residual
//
// A buffer holds one slot per rank, back to back; slots are multiples of 16 bytes, so that every message is aligned,
// and on the way down of one size where that costs little, so that an all-gather can carry them. On a GPU buffers and
// tensors are the device's, and after the first steps nothing waits: damaged messages come as NaN, and as an Error from
// a later call.
//
// Threads: begin() of relays and encode_up() belong to one thread, decode_up() and encode_down() to another,
// decode_down() and end() to a third, if need be; each takes the buckets in the same order.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/collective.h"

namespace gradwire {

struct RelayOptions {
  // all_reduce: as the Reducer does it. The halves alone are up or down only, tensor i belongs whole to rank i % world,
  // and the values of all_gather have the tensors' own type.
  enum class Kind { all_reduce, reduce_scatter, all_gather };
  Kind kind = Kind::all_reduce;
  ReduceOptions reduce;  // method, codecs, feedback, seed, device
  int rank = 0;
  int world = 1;
};

struct RelayStep {
  float loss_scale = 1.0f;
  double rate = 0;     // the learning rate, for codecs that follow it
  bool exact = false;  // warm-up: every tensor goes as fp32, debts included
};

class RelayModel {
 public:
  RelayModel(std::vector<NamedTensor> tensors, const RelayOptions& options);
  ~RelayModel();
  RelayModel(const RelayModel&) = delete;
  RelayModel& operator=(const RelayModel&) = delete;

  // What must be alike on all ranks, as (field, text); who compares them finds out who differs about what.
  std::vector<std::pair<std::string, std::string>> terms() const;

  // A step that was begun and not ended is given up: nothing of it stays.
  void begin(uint64_t step, const RelayStep& how);
  // f32 values that must be finite too, or the open step changes nothing. After a reduce_scatter a rank sees its own
  // shard only; who shares what each saw decides alike everywhere. They may be altered: NaNs become the one that a CPU
  // has.
  void look(std::span<float> values);
  void end();      // both on a GPU on the stream of the options
  void give_up();  // the open step changes nothing

  // What codecs learn from a step, after its end and before the next begin. Bytes of evidence, 0: none is wanted; it is
  // gathered from all ranks, one after the other, and learned.
  size_t evidence_bytes() const;
  void take_evidence(std::span<std::byte> out);
  void learn(std::span<const std::byte> all_ranks);

  // From the next step on this tensor goes as fp32, up and down.
  void exempt(size_t tensor);

  bool divisible(size_t tensor) const;         // into parts: its codecs work on less than the whole tensor
  std::vector<Codec> codecs(Side side) const;  // per tensor, of the step
  ErrorFeedback& feedback();                   // to read; what was learned is among its notes
  void restore(ErrorFeedback&& state);
  uint64_t skipped() const;  // steps whose results were not finite; on a GPU it waits
  const std::vector<NamedTensor>& tensors() const;

 private:
  friend class Relay;
  struct State;
  std::unique_ptr<State> state_;
};

class Relay {
 public:
  // `tensors`: indices in the model's list. `device` names the stream of this relay. The model must outlive it. Of
  // `parts` parts only part number `part` may be taken, of every owner's share: for large tensors that should not
  // travel as one (see RelayModel::divisible). A step must have all of them.
  Relay(RelayModel& model, std::vector<size_t> tensors, const Device& device, uint64_t part = 0, uint64_t parts = 1);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // The codecs and residuals of the model's open step. idle[i]: the i-th tensor of this relay is all zeros on all
  // ranks, and its result will be dropped: what is owed of it stays owed.
  void begin(std::span<const uint8_t> idle = {});

  // Bytes of every slot, after begin().
  const std::vector<size_t>& up_send() const;    // [p]: for rank p
  const std::vector<size_t>& up_recv() const;    // [p]: from rank p
  const std::vector<size_t>& down_recv() const;  // [p]: from owner p; scatter only, empty for gather

  // The tensors' order is that of the constructor.
  void encode_up(std::span<const void* const> in, std::span<std::byte> send);
  // Own messages again, as others will see them: for measurements.
  void decode_own(std::span<const std::byte> send, std::span<void* const> out);
  // Adds up what came and divides. scatter: kept for encode_down. gather: the results, in out. reduce_scatter: the
  // results of this rank's own tensors, in out.
  void decode_up(std::span<const std::byte> recv, std::span<void* const> out = {});
  // What decode_up kept; all_gather: the values of this rank's own tensors.
  void encode_down(std::span<std::byte> mine, std::span<const void* const> values = {});
  void decode_down(std::span<const std::byte> recv, std::span<void* const> out);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradwire
