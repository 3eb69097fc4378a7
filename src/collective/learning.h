// SPDX-License-Identifier: Apache-2.0
// What the codecs of a job learn, on one side (up or down): tensors with the same codec learn together. Their evidence is gathered from all
// ranks in one operation after a step, and their state is kept as notes beside the residuals.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "collective/timer.h"
#include "collective/job.h"
#include "gradwire/learn.h"

namespace gradwire {

class Learning {
 public:
  Learning(const Job& job, Side side, int world);
  bool empty() const { return learners_.empty(); }

  // The codecs of all tensors at `step`.
  std::vector<Codec> codecs(uint64_t step, double rate) const;
  bool looks(uint64_t step) const;
  bool ahead() const;  // some learner must see a step before it is encoded

  // Takes evidence of what one message of this side carries. `ahead`: only those who must see it before.
  void look(Runner& runner, std::span<const Shard> shards, uint64_t step, std::span<const void* const> tensors,
            const Residuals* residuals, std::span<const std::byte> message, bool ahead);
  // Collective: all ranks' evidence, then every learner learns.
  void learn(Engine& engine, uint64_t step, bool ahead, ReduceTimer& clock);
  // The same in parts, for those who gather the evidence themselves; the bytes are the same on all ranks.
  size_t evidence_bytes(uint64_t step, bool ahead) const;
  void take_evidence(uint64_t step, bool ahead, std::span<std::byte> out);
  void learn(uint64_t step, bool ahead, std::span<const std::span<const std::byte>> ranks);

  void keep(ErrorFeedback& feedback) const;     // as notes
  void restore(const ErrorFeedback& feedback);  // from notes, where there are any of these codecs

  void release(size_t tensor);  // it goes as fp32 from now on, and teaches nothing

 private:
  struct Entry {
    std::string note;
    std::vector<size_t> tensors;  // of the job
    Learner learner;
    bool due(uint64_t step, bool ahead) const { return learner.observes(step) && learner.ahead() == ahead; }
  };
  std::vector<Entry> learners_;
  std::vector<Codec> fixed_;  // per tensor: its codec if it learns nothing
};

}  // namespace gradwire
