// SPDX-License-Identifier: Apache-2.0
// A Trial is one measured all-reduce: the same gradients reduced with a codec and with fp32, step by step in turns, on
// every rank of an engine. `bench collective` and `demo` print what it finds.
//
// fp32 is always reduced by `scatter`, which moves the bytes of a plain ring all-reduce whatever the codec's own
// collective is: it is what a user would do without compression.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "gradwire/collective.h"

namespace gradwire::app {

struct TrialOptions {
  std::vector<NamedTensor> tensors;
  ReduceOptions reduce;
  int steps = 15;
};

struct TrialResult {
  double time_s = 0;        // median step, from the moment all ranks are ready until all are done
  double fp32_time_s = 0;   // the same with fp32
  double time_ratio = 0;    // median over steps of time / fp32 time
  uint64_t bytes_sent = 0;  // by one rank to others in one step, mean over ranks
  uint64_t bytes_sent_fp32 = 0;
  double relative_error = 0;  // of the first step's mean, when no residual exists yet
  bool identical = true;      // all ranks held the same bits after every step
};

// What all ranks start from, in f32: this rank's gradients and the exact mean over ranks, tensors back to back.
struct TrialData {
  std::span<const float> mine;
  std::span<const float> mean;
};

// Collective: every rank calls it with the same options. `report(text)` is called on rank 0 as the work proceeds.
TrialResult run_trial(Engine& engine, const TrialOptions& options, const TrialData& data,
                      const std::function<void(const std::string&)>& report = {});

// The mean over ranks of worker_gradients, in double, rounded once.
std::vector<float> exact_mean(const std::vector<std::vector<float>>& ranks);

}  // namespace gradwire::app
