// SPDX-License-Identifier: Apache-2.0
// From gradients to the weights of the next step: what a worker does after its backward pass.
//
//   GradientDescent   gradients are exchanged while they are computed; then all workers take the same step with the
//                     mean (sgd, adam, adamw)
//   MomentumDescent   the same with momenta in place of gradients: see momentum_descent.cc
//   UpdateDescent     every worker computes an update from its own gradient; updates are exchanged, and weights come
//                     back, from the other workers or from a server: see update_descent.h (qadam; with a server, sgd)
//
// A step is begin() before the last backward pass and finish() after it.
#pragma once

#include <c10/core/Stream.h>
#include <torch/types.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "train/control.h"
#include "train/exchange.h"
#include "train/settings.h"
#include "train/updates.h"

namespace gradwire::train {

using TensorMap = std::map<std::string, torch::Tensor>;

struct StepInfo {
  uint64_t step = 0;
  double rate = 0;
  double loss_scale = 1;  // that gradients arrive multiplied by
  bool metered = false;   // the mean that is applied is compared with the exact one
};

// What a checkpoint keeps, as tensors: what is alike on all ranks, and what is this rank's own.
struct DescentState {
  TensorMap shared, own;
};

class Descent {
 public:
  // The exact means, and those that compression has left.
  using Measure = std::function<void(const std::vector<torch::Tensor>& exact, const std::vector<torch::Tensor>& got)>;

  virtual ~Descent() = default;

  // For a run that begins, not for one that is resumed. Returns the first step.
  virtual uint64_t start() { return 0; }

  virtual void begin(const StepInfo& info) = 0;
  // Sends what has not been sent, waits for what comes back, and changes the weights. `report` is called once; it reads
  // the loss of the step, which on a GPU waits for it. `measure` is called if the step is metered.
  virtual StepResult finish(const std::function<Report()>& report, const Measure& measure) = 0;

  virtual ExchangeStats stats() const = 0;
  virtual std::vector<Exchange::Learned> learned() const { return {}; }

  // For checkpoints. To resume, the state is asked for, its tensors are filled with what was saved, and it is given
  // back. Residuals, and what codecs have learned, are apart: one ErrorFeedback per bucket.
  virtual DescentState state() = 0;
  virtual void restore(const DescentState& state) = 0;
  virtual std::vector<ErrorFeedback*> residuals() = 0;

  virtual WorkerPlace membership() const { return {}; }
  virtual nlohmann::json end() { return nullptr; }  // as in Updates
};

struct DescentParts {
  Engine& engine;  // for gradients and updates
  Control& control;
  const Settings& settings;
  uint64_t steps = 0;  // of the run
  double timeout = 0;  // seconds
  std::vector<NamedParameter> parameters;
  std::optional<c10::Stream> stream;  // where the worker computes, on a GPU
  Device codec_device;
  const ServerPlace* server = nullptr;  // null: the workers are the ranks of the engine
  std::vector<NamedParameter> buffers;  // the model's f32 buffers

  ReduceOptions reduce_options() const;  // of the settings, with the length of the run
  Device compute_device() const;  // where the worker computes: the device of the codecs, on the worker's own stream
};

std::vector<torch::Tensor> tensors_of(const std::vector<NamedParameter>& parameters);

std::unique_ptr<Descent> make_momentum_descent(const DescentParts& parts);

// Collective.
std::unique_ptr<Descent> make_descent(const DescentParts& parts);

}  // namespace gradwire::train
