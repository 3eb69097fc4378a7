// SPDX-License-Identifier: Apache-2.0
#include "train/optimizer.h"

#include <torch/autograd.h>

#include <algorithm>
#include <cmath>

namespace gradwire::train {
namespace {

constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kEpsilon = 1e-8;

}  // namespace

std::vector<torch::Tensor> gradients_of(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> list;
  for (const torch::Tensor& parameter : parameters) list.push_back(parameter.grad());
  return list;
}

double norm_of(const std::vector<torch::Tensor>& gradients) {
  torch::NoGradGuard no_grad;
  return torch::stack(torch::_foreach_norm(gradients, 2)).to(torch::kDouble).norm().item<double>();
}

double factor_of(double norm, double clip, double loss_scale) {
  return (clip > 0 ? std::min(1.0, clip / (norm / loss_scale + 1e-6)) : 1.0) / loss_scale;
}

Optimizer::Optimizer(const Settings& settings, std::vector<torch::Tensor> parameters)
    : kind_(settings.optimizer),
      momentum_(settings.momentum),
      weight_decay_(settings.weight_decay),
      parameters_(std::move(parameters)) {
  const int copies = kind_ != "sgd" ? 2 : momentum_ > 0 ? 1 : 0;
  for (int copy = 0; copy < copies; ++copy)
    for (const torch::Tensor& parameter : parameters_)
      state_.push_back(torch::zeros_like(parameter, torch::MemoryFormat::Contiguous));
}

void Optimizer::step(double rate, double factor) {
  torch::NoGradGuard no_grad;
  const std::vector<torch::Tensor> list = gradients_of(parameters_);
  if (factor != 1) torch::_foreach_mul_(list, factor);
  ++steps;
  kind_ == "sgd" ? sgd(list, rate) : adam(list, rate);
}

void Optimizer::sgd(const std::vector<torch::Tensor>& gradients, double rate) {
  if (weight_decay_ > 0) torch::_foreach_add_(gradients, parameters_, weight_decay_);
  if (state_.empty()) return torch::_foreach_add_(parameters_, gradients, -rate);
  torch::_foreach_mul_(state_, momentum_);
  torch::_foreach_add_(state_, gradients);
  torch::_foreach_add_(parameters_, state_, -rate);
}

void Optimizer::adam(const std::vector<torch::Tensor>& gradients, double rate) {
  const std::vector<torch::Tensor> first(state_.begin(),
                                         state_.begin() + static_cast<std::ptrdiff_t>(parameters_.size()));
  const std::vector<torch::Tensor> second(state_.begin() + static_cast<std::ptrdiff_t>(parameters_.size()),
                                          state_.end());
  if (weight_decay_ > 0 && kind_ == "adamw") torch::_foreach_mul_(parameters_, 1 - rate * weight_decay_);
  if (weight_decay_ > 0 && kind_ == "adam") torch::_foreach_add_(gradients, parameters_, weight_decay_);
  torch::_foreach_mul_(first, kBeta1);
  torch::_foreach_add_(first, gradients, 1 - kBeta1);
  torch::_foreach_mul_(second, kBeta2);
  torch::_foreach_addcmul_(second, gradients, gradients, 1 - kBeta2);
  const double correct1 = 1 - std::pow(kBeta1, steps), correct2 = 1 - std::pow(kBeta2, steps);
  const std::vector<torch::Tensor> root = torch::_foreach_sqrt(second);
  torch::_foreach_div_(root, std::sqrt(correct2));
  torch::_foreach_add_(root, kEpsilon);
  torch::_foreach_addcdiv_(parameters_, first, root, -rate / correct1);
}

}  // namespace gradwire::train
