// SPDX-License-Identifier: Apache-2.0
// The one owner of residuals: by (direction, tensor name, first element), in f32 or bf16, on a device. ErrorFeedback is
// a store with a file format. The parameter server and its workers, whose residuals have other ways to disk, use a
// store directly: server/worker_residuals.h for the updates that go up, server/shard.h for the changes that go down.
//
// Each residual has two buffers: the current one, which encode reads, and the next one, where encode writes what is
// left if the step is taken. A step that began all of a residual is committed by swapping the two; if it began only
// parts, their new values are copied into the current buffer, so that the rest keeps what it had. A rollback forgets
// what was begun: the current buffer was never written to.
//
//   ResidualStore store(DType::f32, Device{});
//   store.add({Direction::up, "layer.weight", 0}, count);
//   const auto pointers = store.begin(Direction::up, step, plan.tensors(), 1.0f);
//   runner->encode(tensors, stamp, message, &pointers->residuals);
//   store.commit(step);                                               // or rollback(step)
//   std::span<float> left = store.floats({Direction::up, "layer.weight", 0});
//
// Threads: a store belongs to one thread at a time.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/buffer.h"
#include "device/finite_check.h"
#include "gradwire/feedback.h"

namespace gradwire {

struct ResidualKey {
  Direction direction;
  std::string name;
  uint64_t first;
  friend auto operator<=>(const ResidualKey&, const ResidualKey&) = default;
};

struct Residual {
  uint64_t count;
  Buffer current, next;
  std::map<uint64_t, uint64_t> begun{};  // first element (of the tensor) -> count; disjoint
};

// Where the residuals of some tensors stand in a store. They stay there until one is added, or the store is another.
struct ResidualPlaces {
  struct Place {
    Residual* residual;           // null: the tensor has none
    uint64_t first, count, from;  // elements of the tensor, and the one that the residual starts at
  };
  std::vector<Place> list;
  uint64_t version = 0;
};

class ResidualStore {
 public:
  ResidualStore(DType dtype, const Device& device);  // dtype: f32 or bf16

  // See ErrorFeedback for add, holds, begin, commit and rollback.
  void add(const ResidualKey& key, uint64_t count);
  bool holds(const ResidualKey& key, uint64_t count) const;
  std::unique_ptr<ErrorFeedback::Pointers> begin(Direction direction, uint64_t step,
                                                 std::span<const TensorSpec> tensors, float loss_scale);
  // The same in two parts, for a caller who begins the same tensors in every step: finding a residual by its name takes
  // longer than the rest.
  ResidualPlaces places(Direction direction, std::span<const TensorSpec> tensors);
  bool holds(const ResidualPlaces& places) const { return places.version == version_; }
  uint64_t version() const { return version_; }
  void begin(const ResidualPlaces& places, uint64_t step, float loss_scale, ErrorFeedback::Pointers& pointers);
  void commit(uint64_t step);
  void rollback(uint64_t step);
  // Commits if all results that `finite` has seen in this step are finite, else rolls back. On a GPU the choice is made
  // there, on the stream of `device`, and the host does not wait for it.
  void commit_if_finite(uint64_t step, FiniteCheck& finite, const Device& device);
  std::optional<uint64_t> open_step() const { return open_; }
  void check_closed(const char* what) const;  // throws Error{usage, "step"} while a step is open

  // Makes a residual with undefined contents, for a reader that fills it.
  Residual& make(const ResidualKey& key, uint64_t count);
  // One residual as f32, and new values for it, rounded to dtype().
  std::vector<float> values(const ResidualKey& key) const;
  void set(const ResidualKey& key, std::span<const float> values);
  // The current values themselves. Only a store in f32 on the CPU has them; until the next commit.
  std::span<float> floats(const ResidualKey& key) const;

  const std::map<ResidualKey, Residual>& residuals() const { return residuals_; }
  DType dtype() const { return dtype_; }
  const Device& device() const { return device_; }
  Memory& memory() const { return *memory_; }
  uint64_t bytes(uint64_t count) const { return count * bytes_of(dtype_); }
  uint64_t bytes() const;  // that all residuals take, both buffers

 private:
  Residual* find(Direction direction, const std::string& name, uint64_t first, uint64_t count, uint64_t& start);
  const Residual& at(const ResidualKey& key) const;
  const std::string& name_at(const Residual& residual) const;
  bool close(uint64_t step, const char* how);

  DType dtype_;
  Device device_;
  std::shared_ptr<Memory> memory_;
  std::map<ResidualKey, Residual> residuals_;
  uint64_t version_;              // no two stores ever have the same, nor one before and after a residual was added
  std::optional<uint64_t> open_;  // the step that was begun and not yet decided
};

}  // namespace gradwire
