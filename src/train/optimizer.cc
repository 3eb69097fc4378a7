// SPDX-License-Identifier: Apache-2.0
#include "train/optimizer.h"

#include <ATen/Parallel.h>
#include <torch/autograd.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace gradwire::train {

Device with_torch_threads(Device device) {
  device.threads = at::get_num_threads();
  return device;
}

std::vector<torch::Tensor> zeros_like(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> list;
  for (const torch::Tensor& one : tensors)
    list.push_back(torch::zeros_like(one, torch::MemoryFormat::Contiguous).detach());
  return list;
}

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

Optimizer::Optimizer(const Settings& settings, std::vector<torch::Tensor> parameters, const Device& device)
    : kind_(settings.optimizer),
      sgd_{.momentum = settings.momentum, .weight_decay = settings.weight_decay},
      adam_(settings.adam_options()),
      elementwise_(with_torch_threads(device)),
      parameters_(std::move(parameters)) {
  const int copies = kind_ != "sgd" ? 2 : sgd_.momentum > 0 ? 1 : 0;
  for (int copy = 0; copy < copies; ++copy)
    for (torch::Tensor& zeros : zeros_like(parameters_)) state_.push_back(std::move(zeros));
}

void Optimizer::step(double rate, double factor) {
  const size_t count = parameters_.size();
  const auto state = [&](size_t i) { return i < state_.size() ? state_[i].data_ptr<float>() : nullptr; };
  std::vector<OptimizerSpan> spans;
  for (size_t i = 0; i < count; ++i) {
    const torch::Tensor& weights = parameters_[i];
    const torch::Tensor& gradient = weights.grad();
    GW_CHECK(weights.is_contiguous() && gradient.defined() && gradient.is_contiguous());
    spans.push_back({.gradient = gradient.data_ptr<float>(),
                     .first = state(i),
                     .second = state(count + i),
                     .shared = nullptr,
                     .out = weights.data_ptr<float>(),
                     .count = static_cast<uint64_t>(weights.numel())});
  }
  ++steps;
  if (kind_ == "sgd")
    sgd_step(elementwise_, spans, sgd_, rate, factor);
  else
    adam_step(elementwise_, spans, adam_, static_cast<uint64_t>(steps), rate, factor);
}

}  // namespace gradwire::train
