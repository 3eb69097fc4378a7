// SPDX-License-Identifier: Apache-2.0
// What codecs learn while a model trains: optquant its levels, casq its clusters, dqsgd its bits, rangefloat and fft a mantissa, fft
// also theta. One course for all of them, the same on every rank:
//
//   1. a step is encoded with learner.codec(step)
//   2. where learner.looks(step), evidence is taken: from a sample of what was encoded, or from the side values of the message.
//      It is integers only, so that it can be added up in any order
//   3. the ranks' evidence is gathered, and learner.learn(step, all of it) makes a new table, in effect from step + 1 on
//
// The table is part of the codec and travels in every message. save() and restore() keep the rest: a run that was stopped and restored goes
// on bit for bit. A Reducer does all this by itself, and keeps the state with the residuals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gradwire/codec.h"
#include "gradwire/runner.h"

namespace gradwire {

class Learner {
 public:
  // `elements`: that one rank sends with this codec in a step; `world`: ranks.
  Learner(const Codec& codec, uint64_t elements, int world);
  ~Learner();
  Learner(Learner&&) noexcept;
  Learner& operator=(Learner&&) noexcept;

  const Codec& base() const;
  // What `step` is encoded with; fp32 while a codec warms up. rate: the learning rate, for those that follow it.
  Codec codec(uint64_t step, double rate = 0) const;

  bool looks(uint64_t step) const;  // evidence of this step is wanted
  bool ahead() const;               // it is wanted before the step is encoded (dqsgd:mode=paper)
  // Takes evidence of the tensors `which` of the runner's plan (indices), as they are or were encoded: a sample of `tensors`, or the sides of
  // `message`. On a GPU this only enqueues; collect() comes after the runner's wait().
  void look(Runner& runner, std::span<const uint32_t> which, uint64_t step, std::span<const void* const> tensors,
            const Residuals* residuals, std::span<const std::byte> message);
  void collect();

  size_t evidence_bytes() const;                 // the same on all ranks
  void take_evidence(std::span<std::byte> out);  // and forgets it
  void learn(uint64_t step, std::span<const std::span<const std::byte>> ranks);

  std::vector<std::byte> save() const;             // a multiple of 8 bytes
  void restore(std::span<const std::byte> state);  // throws Error{frame, "learned"} unless it is of this codec

 private:
  friend Codec fit(const Codec& codec, const void* tensor, uint64_t count, DType dtype, const Device& device);
  struct State;
  std::unique_ptr<State> state_;
};

// The codec fitted to one tensor alone: what `gradwire encode` does. Codecs that do not learn come back as they are.
Codec fit(const Codec& codec, const void* tensor, uint64_t count, DType dtype, const Device& device = {});

}  // namespace gradwire
