// SPDX-License-Identifier: Apache-2.0
// SGD with momentum, Adam and AdamW over lists of tensors, with the arithmetic of torch.optim: a few operations on all
// parameters at once, so that on a GPU a model of many small tensors is not many small launches. State is plain
// tensors, in a fixed order.
#pragma once

#include <torch/types.h>

#include <string>
#include <vector>

#include "train/settings.h"

namespace gradwire::train {

std::vector<torch::Tensor> gradients_of(const std::vector<torch::Tensor>& parameters);
double norm_of(const std::vector<torch::Tensor>& gradients);  // of all of them; not finite if any element is not
// What gradients that arrive multiplied by `loss_scale` are to be multiplied by: unscaling and clipping in one.
double factor_of(double norm, double clip, double loss_scale);

class Optimizer {
 public:
  Optimizer(const Settings& settings, std::vector<torch::Tensor> parameters);

  void step(double rate, double factor);  // gradients are first multiplied by `factor`

  const std::vector<torch::Tensor>& parameters() const { return parameters_; }
  // What must be saved with the parameters: moments, and how many steps were taken.
  const std::vector<torch::Tensor>& state() const { return state_; }
  int64_t steps = 0;

 private:
  void sgd(const std::vector<torch::Tensor>& gradients, double rate);
  void adam(const std::vector<torch::Tensor>& gradients, double rate);

  std::string kind_;
  double momentum_, weight_decay_;
  std::vector<torch::Tensor> parameters_, state_;  // sgd: momentum; adam: first, then second moments
};

}  // namespace gradwire::train
