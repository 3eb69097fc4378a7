// SPDX-License-Identifier: Apache-2.0
// Where the updates of a worker go, and where its weights come from. A qadam worker computes an update from its own
// gradient. The implementation of Updates adds the worker's residual, sends the sum compressed, averages what all
// workers have sent, subtracts the mean from weights in full precision, and returns the weights at which the next
// gradient is computed. MeanUpdates does so over an Engine (mean_updates.h), ServerUpdates with a parameter server, for
// workers that come and go (server_updates.h). The update of an sgd worker is the gradient itself: it needs a server,
// which makes a step with momentum of the mean.
//
// Arrays are f32 on the host, one pointer per parameter, in the order of the list that the implementation was
// constructed with. Both implementations do the same arithmetic on W workers:
//
//   mean    decoded updates added up in rank order in f32, beginning with 0; divided by float(W)
//   x       x - mean, one subtraction
//   down    weights: the decoded message of x, Stamp{seed, step: the next one, stage 1, rank 0, world 1}, no feedback
//   up      Stamp{seed, step, stage 0, rank, world W}, with feedback where the codec or the user wants it
//
// This file does not need torch.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gradwire/collective.h"

namespace gradwire::train {

// What a worker reports with each step. A server shows it.
struct Report {
  double loss = 0;       // mean over the samples of this worker's step
  uint64_t samples = 0;  // labels, in fact: tokens where a language model is trained
  double rate = 0;       // the learning rate, for codecs that follow it
};

struct StepResult {
  uint64_t next = 0;    // the step that the weights are for
  bool applied = true;  // false: this worker's update did not count, because a value was not finite
};

// What this worker has sent, and what that took.
struct ExchangeStats {
  double bits = 0;          // per element sent up, in the last step
  uint64_t bytes_sent = 0;  // since the start
  double waited = 0;        // seconds of wall time that the worker has waited for the exchange
  ReduceTimes times;        // since the start
  ReduceMemory memory;
  size_t buckets = 1;
};

// The place of a worker among workers that come and go. The workers of an Engine have none and need only the defaults.
struct WorkerPlace {
  std::optional<uint32_t> rank;  // given by the server; it decides which samples are this worker's
  bool leads = true;             // this worker evaluates the model and owns the buffers
};

class Updates {
 public:
  virtual ~Updates() = default;

  // In: the weights that this worker would begin with, in full precision. Out: those to compute the first gradient at.
  // Returns the step of that gradient: 0, or the step that the other workers have reached.
  virtual uint64_t begin(std::span<float* const> weights) = 0;

  // One step. `updates` are finite and do not contain the residual. They are empty if this worker's gradient was not
  // finite: it sends nothing in this step and keeps its residual. Out: the weights of the next step.
  virtual StepResult exchange(uint64_t step, std::span<const float* const> updates, std::span<float* const> weights,
                              const Report& report) = 0;

  // In: this worker's second moments. Out: their mean over the workers, in f32, added up in rank order. All workers
  // call it for the same steps, before their exchange(step).
  virtual void pool(uint64_t step, std::span<float* const> second) = 0;

  virtual ExchangeStats stats() const = 0;

  // For checkpoints. The weights in full precision, one array per parameter, which may be read, and written before the
  // first exchange; empty if a server holds them.
  virtual std::vector<std::span<float>> held() { return {}; }
  // This worker's residuals and what its codecs have learned; null if they are no part of a checkpoint.
  virtual ErrorFeedback* residuals() { return nullptr; }

  virtual WorkerPlace membership() const { return {}; }
  virtual void send_buffers(std::span<const float* const>) {}           // of the worker that leads
  virtual bool take_buffers(std::span<float* const>) { return false; }  // those that were sent last, if there are any
  virtual nlohmann::json end() { return nullptr; }  // leaves, and returns a record of the connection
};

}  // namespace gradwire::train
