// SPDX-License-Identifier: Apache-2.0
// The optimizer that all workers run with the mean gradient: SGD with momentum, Adam or AdamW over a model's tensors.
//
// The arithmetic is ours (optim/adam.h) and not torch's, because workers must end a step with the same bits. torch's
// square root goes to a vector library that looks for its processor at the first call, without a lock, and answers with
// twelve bits while two threads make that call at once (docs/decisions.md).
#pragma once

#include <torch/types.h>

#include <string>
#include <vector>

#include "optim/adam.h"
#include "train/settings.h"

namespace gradwire::train {

// On the CPU a worker's torch threads tell how many threads it may use.
Device with_torch_threads(Device device);

std::vector<torch::Tensor> zeros_like(const std::vector<torch::Tensor>& tensors);  // contiguous
std::vector<torch::Tensor> gradients_of(const std::vector<torch::Tensor>& parameters);
double norm_of(const std::vector<torch::Tensor>& gradients);  // of all of them; not finite if any element is not
// What gradients that arrive multiplied by `loss_scale` are to be multiplied by: unscaling and clipping in one.
double factor_of(double norm, double clip, double loss_scale);

class Optimizer {
 public:
  // `device` is where the parameters are, with the stream that the worker computes on.
  Optimizer(const Settings& settings, std::vector<torch::Tensor> parameters, const Device& device);

  void step(double rate, double factor);  // gradients are first multiplied by `factor`

  const std::vector<torch::Tensor>& parameters() const { return parameters_; }
  // What must be saved with the parameters: moments, and how many steps were taken.
  const std::vector<torch::Tensor>& state() const { return state_; }
  int64_t steps = 0;

 private:
  std::string kind_;
  SgdOptions sgd_;
  AdamOptions adam_;
  Elementwise elementwise_;
  std::vector<torch::Tensor> parameters_, state_;  // sgd: momentum; adam: first, then second moments
};

}  // namespace gradwire::train
