// SPDX-License-Identifier: Apache-2.0
// Batches for one worker. A step takes workers x accumulate x batch samples of the epoch's order, this worker its own
// part of them; what does not fill a step at an epoch's end is left out. Which samples a step sees depends on (seed,
// step) and these numbers alone, so a restarted run goes on with the samples that were due.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>
#include <vector>

#include "train/data.h"
#include "train/settings.h"

namespace gradwire::train {

struct Batch {
  torch::Tensor inputs;  // images: normalised floats; text: token numbers
  torch::Tensor labels;  // flat
};

class Batches {
 public:
  Batches(const Task& task, const Settings& settings, int rank, torch::Device device);

  // For a worker whose rank comes from a server. Ranks beyond settings.workers see the samples in another order; this
  // worker then evaluates all test samples.
  void take_rank(uint32_t rank);
  uint64_t steps_per_epoch() const { return per_epoch_; }
  Batch training(uint64_t step, int pass);
  // This worker's share of the test samples, in batches.
  std::vector<std::pair<uint64_t, uint64_t>> test_ranges() const;  // first, count
  Batch test(uint64_t first, uint64_t count) const;

 private:
  Batch collect(const Samples& samples, std::span<const uint32_t> which, bool augment, uint64_t epoch) const;

  const Task& task_;
  const Settings& settings_;
  uint64_t rank_, per_epoch_, order_seed_;
  bool alone_ = false;
  torch::Device device_;
  torch::Tensor mean_, deviation_;
  uint64_t ordered_epoch_ = UINT64_MAX;
  std::vector<uint32_t> order_;
};

}  // namespace gradwire::train
