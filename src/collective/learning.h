// SPDX-License-Identifier: Apache-2.0
// What the codecs of a job learn in one direction: tensors with the same codec learn together. Statistics are gathered
// from all ranks after a step, and what was learned is saved as extra state beside the residuals.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collective/job.h"
#include "gradwire/learn.h"

namespace gradwire {

class Learning;
using Learnings = std::vector<Learning*>;

class Learning {
 public:
  Learning(const Job& job, Direction direction, int world);
  bool empty() const { return learners_.empty(); }

  // The codecs of all tensors at `step`.
  std::vector<Codec> codecs(uint64_t step, double rate) const;
  // "up:<codec>: <plan>" for each learner that has a plan.
  std::vector<std::string> plans() const;
  bool ahead() const;  // some learner must see a step before it is encoded

  // Collects statistics of what one message of this direction carries. `ahead`: only for the learners that need them
  // before the step is encoded. On a GPU this only enqueues.
  void observe(const std::shared_ptr<Runner>& runner, std::span<const Shard> shards, uint64_t step,
               std::span<const void* const> tensors, const Residuals* residuals, std::span<const std::byte> message,
               bool ahead);
  // The statistics of this rank, which are forgotten here, and then those of all ranks. Their size is the same on all
  // ranks; it is 0 where the step teaches nothing. take_stats() waits for a GPU.
  size_t stats_bytes(uint64_t step, bool ahead) const;
  void take_stats(uint64_t step, bool ahead, std::span<std::byte> out);
  void discard();  // what was observed

  void save(ErrorFeedback& feedback) const;     // as extra state
  void restore(const ErrorFeedback& feedback);  // where there is extra state of these codecs

  void exempt(size_t tensor);  // it is sent as fp32 from now on, and teaches nothing

 private:
  friend void learn(const Learnings&, uint64_t step, bool ahead, std::span<const std::byte> all_ranks, int world);
  struct LearnerEntry {
    std::string name;             // of its extra state
    std::vector<size_t> tensors;  // of the job
    Learner learner;
    std::vector<std::shared_ptr<Runner>> asked = {};  // that the learner has observed with, and not collected from
    void collect();
    bool due(uint64_t step, bool ahead) const { return learner.observes(step) && learner.ahead() == ahead; }
  };
  std::vector<LearnerEntry> learners_;
  std::vector<Codec> fixed_;  // per tensor: its codec if it learns nothing
};

// The same for several of them at once: their statistics stand one after the other. `all_ranks` holds those of every
// rank, in rank order. Learners of the same name, which jobs that carry parts of one model have, learn as one, from the
// statistics of all of them.
size_t stats_bytes(const Learnings& learnings, uint64_t step, bool ahead);
void take_stats(const Learnings& learnings, uint64_t step, bool ahead, std::span<std::byte> out);
void learn(const Learnings& learnings, uint64_t step, bool ahead, std::span<const std::byte> all_ranks, int world);

}  // namespace gradwire
