// SPDX-License-Identifier: Apache-2.0
// What codecs learn while a model trains: levels, clusters, a number of bits. The course is the same for all of them,
// and the same on every rank:
//
//   1. a step is encoded with learner.codec(step)
//   2. where learner.observes(step), statistics are taken: from a sample of what was encoded, or from the scales of the
//      message. They are integers, so that they can be added up in any order
//   3. the statistics of all ranks are gathered, and learner.learn(step, all of them) makes a new table, which is in
//      effect from step + 1 on
//
// The table is part of the codec and travels in every message. save() and restore() keep the rest: a run that was
// stopped and restored goes on bit for bit. A Reducer does all this by itself, and keeps the state with the residuals.
//
// Threads: a Learner belongs to one thread at a time, and observe() and collect() use the runner, which then belongs to
// that thread too. Different learners are independent, and fit() may be called from any thread.
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
  // Throws Error{usage, "codec"} for a codec that learns nothing. `elements`: how many elements one rank sends with
  // this codec in a step; `world`: the number of ranks; `steps`: the length of the run, for codecs that plan with it
  // (dqsgd), or 0 if it is not known; `share`: where several learners share a model, the part of its elements that
  // this one decides for, and so its part of a bound on the error.
  Learner(const Codec& codec, uint64_t elements, int world, uint64_t steps = 0, double share = 1);
  ~Learner();
  Learner(Learner&&) noexcept;
  Learner& operator=(Learner&&) noexcept;

  const Codec& base() const;
  // What `step` is encoded with; fp32 while a codec warms up. `rate` is the learning rate, for codecs that follow it;
  // below 0: it is not given, which those codecs refuse.
  Codec codec(uint64_t step, double rate = -1) const;

  bool observes(uint64_t step) const;  // statistics of this step are wanted
  bool ahead() const;                  // they are wanted before the step is encoded
  // Takes statistics of the tensors `which` of the runner's plan (indices), as they are or were encoded: from a sample
  // of `tensors`, or from the scales of `message`. On a GPU this only enqueues: collect() takes what all calls since
  // the last one have asked for, and comes after wait() of their runners, which must be different ones.
  void observe(Runner& runner, std::span<const uint32_t> which, uint64_t step, std::span<const void* const> tensors,
               const Residuals* residuals, std::span<const std::byte> message);
  void collect();
  void discard();  // what was observed and not taken

  size_t stats_bytes() const;                 // the same on all ranks
  void take_stats(std::span<std::byte> out);  // and forgets them
  // For statistics from a peer that is not trusted: throws Error{frame, "statistics"} unless learn() can take them
  // together with those of kMostPooled - 1 others. That is a matter of sizes and ranges. A peer can still lie within
  // them, and learn() then throws an Error and keeps the table, or makes a table that is valid and useless.
  void check_stats(std::span<const std::byte> stats) const;
  static constexpr size_t kMostPooled = 128;
  void learn(uint64_t step, std::span<const std::span<const std::byte>> ranks);

  std::string plan() const;  // what the codec plans with, in a line for people; mostly empty

  std::vector<std::byte> save() const;             // a multiple of 8 bytes
  void restore(std::span<const std::byte> state);  // throws Error{frame, "learned"} unless it is of this codec

 private:
  friend Codec fit(const Codec& codec, const void* tensor, uint64_t count, DType dtype, const Device& device);
  struct State;
  std::unique_ptr<State> state_;
};

// The codec fitted to one tensor alone, as `gradwire encode` does it. Codecs that do not learn come back as they are.
Codec fit(const Codec& codec, const void* tensor, uint64_t count, DType dtype, const Device& device = {});

}  // namespace gradwire
