// SPDX-License-Identifier: Apache-2.0
// Error feedback: what compression leaves out of a step, the residual, is added to the next one. Residuals are kept by
// tensor name, unscaled, in f32 or bf16. encode writes the new residual beside the old one, and commit(step) or
// rollback(step) decides when all tensors of the step are decoded: a skipped step changes no residual, on any rank. The
// state is saved to one file, and can be redistributed to another number of ranks.
//
// There are two directions. `up`: the residual of a worker, its own gradient less what it sent. `down`: the residual of
// the owner of a shard, the mean less what it sent to all ranks; a rank keeps it for the shards that it owns.
//
//   ErrorFeedback feedback;
//   feedback.add(Direction::up, "layer.weight", count);
//   const auto begun = feedback.begin(Direction::up, step, plan.tensors());
//   runner->encode(tensors, stamp, message, &begun->residuals);
//   feedback.commit(step);                                     // or rollback(step), if the step is skipped
//
// Threads: an ErrorFeedback belongs to one thread at a time. That of a Reducer may be used while no step is under way.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gradwire/plan.h"
#include "gradwire/runner.h"

namespace gradwire {

enum class Direction : uint8_t { up = 0, down = 1 };

class ErrorFeedback {
 public:
  explicit ErrorFeedback(DType dtype = DType::f32, const Device& device = {});  // dtype: f32 or bf16
  ~ErrorFeedback();
  ErrorFeedback(ErrorFeedback&&) noexcept;
  ErrorFeedback& operator=(ErrorFeedback&&) noexcept;

  // Adds a residual of zeros for `count` elements of tensor `name` from element `first` on. With the numbers of one
  // that was added before, nothing happens; with others that overlap it: Error{usage}.
  void add(Direction direction, const std::string& name, uint64_t count, uint64_t first = 0);

  // Whether one residual that was added holds all of these elements.
  bool holds(Direction direction, const std::string& name, uint64_t count, uint64_t first = 0) const;

  // The residuals of `tensors` for one encode at `step`. Tensors that were not added get no feedback. A tensor may be
  // a part of one that was added whole. The object must outlive the encode call.
  struct Pointers {
    std::vector<const void*> before;
    std::vector<void*> after;
    Residuals residuals;  // spans over the two vectors
  };
  std::unique_ptr<Pointers> begin(Direction direction, uint64_t step, std::span<const TensorSpec> tensors,
                                  float loss_scale = 1.0f);

  // The elements begun at `step` take their new residual, or keep the old one; all others keep theirs. Without an open
  // step nothing happens; if another step is open: Error{usage}.
  void commit(uint64_t step);
  void rollback(uint64_t step);
  std::optional<uint64_t> open_step() const;  // the one that was begun and is not yet decided

  void save(const std::string& path) const;  // atomic: the old file stays whole until the new one is complete
  static ErrorFeedback load(const std::string& path,
                            const Device& device = {});  // a truncated or altered file is refused

  // The states of all ranks, redistributed to another number of ranks. What is kept is, in units of the mean,
  // (1/W) * (sum of the workers' residuals) + (sum of the owners' residuals), within f32 rounding. On two levels
  // (ReduceOptions::nodes) the nodes are the workers. The states know their own nodes; `new_nodes` says how many nodes
  // the new ranks have, node after node, and 0 means one level.
  static std::vector<ErrorFeedback> redistribute(std::span<const ErrorFeedback> ranks, int new_world,
                                                 int new_nodes = 0);

  // Extra state that must survive with the residuals, by name: what codecs have learned. Each has a multiple of 8
  // bytes. redistribute() keeps that of rank 0, since it is the same on all ranks.
  void set_extra(const std::string& name, std::span<const std::byte> bytes);
  const std::map<std::string, std::vector<std::byte>>& extras() const;

  // The residual that was added with this `first`, copied to the host, as f32.
  std::vector<float> residual(Direction direction, const std::string& name, uint64_t first = 0) const;
  // All residuals, and new values for one of them, rounded to dtype(). Error{usage} while a step is open.
  struct Entry {
    Direction direction;
    std::string name;
    uint64_t first, count;
  };
  std::vector<Entry> entries() const;
  void set_residual(Direction direction, const std::string& name, uint64_t first, std::span<const float> values);
  uint64_t hash() const;  // of every committed residual and all extra state: equal states have equal hashes

  DType dtype() const;
  const Device& device() const;  // where the residuals are
  uint64_t bytes() const;        // that they take there, both copies

 private:
  friend struct FeedbackAccess;  // for the library's own functions

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradwire
