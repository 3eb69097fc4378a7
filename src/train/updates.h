// SPDX-License-Identifier: Apache-2.0
// Where a worker's updates go, and where weights come from. A worker that runs qadam computes its own update from its
// own gradient; whoever stands behind Updates adds the worker's residual, sends it compressed, averages what all
// workers sent, takes the mean off the weights that are held in full precision, and hands back weights to compute the
// next gradient at: MeanUpdates does so over an Engine (mean_updates.h), a server for workers that come and go.
//
// Arrays are f32 on the host, one pointer a parameter, in the order of the list that the implementation was made with.
// Both implementations do the same arithmetic on W workers:
//
//   mean    decoded updates added up in rank order in f32, beginning with 0; divided by float(W)
//   x       x - mean, one subtraction
//   down    weights: the decoded message of x, Stamp{seed, step: the next one, stage 1, rank 0, world 1}, no feedback
//   up      Stamp{seed, step, stage 0, rank, world W}, with feedback
//
// No torch here.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gradwire/collective.h"

namespace gradwire::train {

// What is told with a worker's step; a server likes to show it.
struct Report {
  double loss = 0;       // mean over the samples of this worker's step
  uint64_t samples = 0;  // labels, in fact: tokens where a language model is trained
  double rate = 0;       // the learning rate, for codecs that follow it
};

struct Taken {
  uint64_t next = 0;    // the step that the weights are for
  bool applied = true;  // false: left out for all, because something was not finite; the weights are those of before
};

class Updates {
 public:
  virtual ~Updates() = default;

  // In: the weights that this worker would begin with, in full precision. Out: those to compute the first gradient at.
  // Returns its step: 0, or where others already are.
  virtual uint64_t begin(std::span<float* const> weights) = 0;

  // One step. `updates` are without the residual, and finite. Out: the weights of the next step.
  virtual Taken exchange(uint64_t step, std::span<const float* const> updates, std::span<float* const> weights,
                         const Report& report) = 0;
  // Likewise, of a worker whose gradient is not finite: it has nothing to send in this step, its residual stays.
  virtual Taken skip(uint64_t step, std::span<float* const> weights, const Report& report) = 0;

  // In: this worker's second moments. Out: their mean over the workers, in f32, added up in rank order. All workers
  // call it for the same steps, before their exchange(step).
  virtual void pool(uint64_t step, std::span<float* const> second) = 0;

  virtual double bits() const = 0;          // per element sent up, of the last step
  virtual uint64_t bytes_sent() const = 0;  // so far, by this worker
  virtual ReduceTimes times() const = 0;    // so far
  virtual ReduceMemory memory() const = 0;

  // For checkpoints. Weights in full precision, one array a parameter, that may be read, and written before the first
  // exchange; empty where they are held elsewhere.
  virtual std::vector<std::span<float>> held() = 0;
  // This worker's own: its residuals, and what its codecs have learned, as one file.
  virtual void save(const std::string& path) const = 0;
  virtual void load(const std::string& path) = 0;

  // Of a worker among workers that come and go; the others need none of it.
  virtual std::optional<uint32_t> seat() const { return std::nullopt; }  // its number, which tells its samples
  virtual bool leads() const { return true; }                            // is the one that evaluates, and keeps buffers
  virtual void send_buffers(std::span<const float* const>) {}
  virtual bool take_buffers(std::span<float* const>) { return false; }  // those of the workers that were here before
  virtual nlohmann::json end() { return nullptr; }                      // leaves in order; what there is to say of it
};

}  // namespace gradwire::train
