// SPDX-License-Identifier: Apache-2.0
// One measured all-reduce: the same gradients are reduced with a codec and with fp32, step by step in turns, on every
// rank of an engine. `bench collective` and `demo` print the result.
//
// fp32 is always reduced by `scatter`, whatever the collective of the codec is: it moves the bytes of a plain ring
// all-reduce, which is what a user would have without compression. On two levels fp32 has two levels as well, and a
// third reducer takes turns, which has the codec on one level.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "gradwire/collective.h"

namespace gradwire::app {

struct ReduceBenchOptions {
  std::vector<NamedTensor> tensors;
  ReduceOptions reduce;
  int steps = 15;
};

struct ReduceBenchResult {
  double time_s = 0;          // median step, from the moment all ranks are ready until all are done
  double fp32_time_s = 0;     // the same with fp32
  double time_over_fp32 = 0;  // median over steps of time / fp32 time
  uint64_t bytes_sent = 0;    // by one rank to others in one step, mean over ranks
  uint64_t bytes_sent_fp32 = 0;
  // On two levels: what leaves a node in one step, mean over nodes, and the same of the codec on one level.
  uint64_t node_bytes = 0, node_bytes_fp32 = 0, node_bytes_one_level = 0;
  double one_level_time_s = 0, time_over_one_level = 0;
  int nodes = 0;          // 0: one level
  double error = 0;       // of the first step's result, when no residual exists yet
  bool identical = true;  // all ranks held the same bits after every step

  // fp32 bytes / bytes sent; 1 where nothing is sent, because there is one rank.
  double ratio() const {
    return bytes_sent == 0 ? 1.0 : static_cast<double>(bytes_sent_fp32) / static_cast<double>(bytes_sent);
  }
};

// The input of a rank, in f32: this rank's gradients and the exact mean over ranks, tensors back to back.
struct ReduceBenchData {
  std::span<const float> mine;
  std::span<const float> mean;
};

// Collective: every rank calls it with the same options. `report(text)` is called on rank 0 as the work proceeds.
ReduceBenchResult run_reduce_bench(Engine& engine, const ReduceBenchOptions& options, const ReduceBenchData& data,
                                   const std::function<void(const std::string&)>& report = {});

// The mean over ranks of worker_gradients, in double, rounded once.
std::vector<float> exact_mean(const std::vector<std::vector<float>>& ranks);

}  // namespace gradwire::app
