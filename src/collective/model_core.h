// SPDX-License-Identifier: Apache-2.0
// What all buckets of a model share: residuals by tensor name, what the codecs learn, the open step and the check that
// its results are finite. A ModelCoder shows it to callers who move bytes themselves; a Reducer has one of its own.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "collective/bucket_core.h"
#include "gradwire/coder.h"

namespace gradwire {

struct ModelCore {
  ModelCore(std::vector<NamedTensor> tensors, const CoderOptions& options, JobPlace place = {}, size_t bare = 0);

  bool has_up() const { return options.kind != CoderOptions::Kind::all_gather; }
  bool has_down() const {
    return options.kind == CoderOptions::Kind::all_gather ||
           (options.kind == CoderOptions::Kind::all_reduce && scatter);
  }
  RankInfo self() const { return {options.rank, options.world}; }
  std::vector<Shard> all_shards() const;  // of all tensors, with their owners
  // A bucket of these tensors (indices), or of one of `parts` parts of every owner's shards.
  BucketPlan bucket(const std::vector<size_t>& tensors, uint64_t part = 0, uint64_t parts = 1) const;

  // The course of a step: begin, then end, commit, leave_open or abandon.
  void begin(uint64_t step, const StepOptions& how);
  StepContext context(std::span<const uint8_t> idle = {}) {
    return {*step, &feedback, how.loss_scale * input_scale, options.reduce.decay, idle};
  }
  void choose(Direction direction);         // the codecs of the step; epochs tells whether they have changed
  Learning* learning(Direction direction);  // null where this step teaches nothing
  void end();                               // takes the step if its results are finite. On a GPU this only enqueues
  void commit();                            // takes the step
  void leave_open();                        // the caller decides on the residuals later
  void abandon();                           // the step changes nothing, and what was learned from it is forgotten
  void roll_back(uint64_t decided);         // the same for a step that was left open
  // Nothing would change if a step were taken: no residuals, nothing to learn.
  bool stateless() const { return learnings.empty() && feedback.bytes() == 0; }

  void check_open(const char* what) const;
  void check_tensor(size_t tensor) const;
  void settle();        // whether the step that has ended was finite; if not, it teaches nothing. Waits for a GPU
  void forget();        // the statistics of a step that has ended
  void save_learned();  // beside the residuals
  void unlearn();       // back to what was known before the step
  void follow_state();  // the residuals may have been replaced by others, and what was learned with them

  CoderOptions options;
  bool scatter;
  Job job;
  ErrorFeedback feedback;
  Learning up_learning, down_learning;
  Learnings learnings;  // of the directions that there are, without empty ones
  FiniteCheck finite;
  std::vector<bool> divisible;
  std::array<uint64_t, 2> epochs{};  // of the codecs, by direction
  // Steps that have ended, and states that were restored: the same numbers on all ranks. Residual buffers change places
  // with each of the former, and are others after each of the latter.
  uint64_t ended = 0, restored = 0;
  std::optional<uint64_t> step;       // the open one
  std::optional<uint64_t> taught;     // one that has ended, and whose statistics are not yet learned from
  std::optional<uint64_t> undecided;  // one that was left open
  StepOptions how;
  float input_scale = 1;  // the inputs are so many times a gradient: the sum of a node's ranks may be sent as one

 private:
  using Extras = std::map<std::string, std::vector<std::byte>>;
  bool unsettled_ = false;  // nobody has looked yet whether the step that has ended was finite
  bool owns_step_ = false;  // the open step of `feedback` was begun here
  Extras saved_, before_;   // as written last, and as they were before the step
};

}  // namespace gradwire
