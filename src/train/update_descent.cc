// SPDX-License-Identifier: Apache-2.0
#include "train/update_descent.h"

#include <torch/autograd.h>

#include <cmath>

#include "core/check.h"
#include "train/optimizer.h"

namespace gradwire::train {
namespace {

constexpr uint64_t kBufferSteps = 50;  // between two sendings of the buffers

}  // namespace

std::vector<float*> UpdateDescent::pointers(const std::vector<torch::Tensor>& tensors) {
  std::vector<float*> list;
  for (const torch::Tensor& tensor : tensors) list.push_back(tensor.data_ptr<float>());
  return list;
}

std::vector<const float*> UpdateDescent::constant(const std::vector<torch::Tensor>& tensors) {
  const std::vector<float*> list = pointers(tensors);
  return {list.begin(), list.end()};
}

UpdateDescent::UpdateDescent(const DescentParts& parts, std::unique_ptr<Updates> updates)
    : updates_(std::move(updates)), clip_(parts.settings.clip) {
  torch::NoGradGuard no_grad;
  for (const NamedParameter& one : parts.parameters) {
    GW_CHECK(one.tensor.is_contiguous() && one.tensor.scalar_type() == torch::kFloat32);
    parameters_.push_back(one.tensor);
    own_.push_back(torch::zeros_like(one.tensor));
    host_.push_back(one.tensor.is_cuda() ? torch::zeros_like(one.tensor, torch::kCPU) : own_.back());
    weights_.push_back(one.tensor.is_cuda() ? torch::zeros_like(one.tensor, torch::kCPU) : one.tensor.detach());
    names_.push_back(one.name);
  }
  for (const NamedParameter& one : parts.buffers) buffers_.push_back(one.tensor);
}

uint64_t UpdateDescent::start() {
  torch::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (parameters_[i].is_cuda()) weights_[i].copy_(parameters_[i]);
  const uint64_t step = updates_->begin(pointers(weights_));
  take_weights();
  std::vector<torch::Tensor> received;
  for (const torch::Tensor& buffer : buffers_) received.push_back(torch::empty_like(buffer, torch::kCPU));
  if (updates_->take_buffers(pointers(received)))
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].copy_(received[i]);
  return step;
}

// Returns false if this worker has nothing to send.
bool UpdateDescent::compute() {
  const std::vector<torch::Tensor> gradients = gradients_of(parameters_);
  for (const torch::Tensor& gradient : gradients) GW_CHECK(gradient.defined() && gradient.is_contiguous());
  const double norm = norm_of(gradients);
  const bool finite = std::isfinite(norm / info_.loss_scale);
  if (finite)
    if (const double factor = factor_of(norm, clip_, info_.loss_scale); factor != 1)
      torch::_foreach_mul_(gradients, factor);
  compute_update(finite ? &gradients : nullptr);
  return finite;
}

StepResult UpdateDescent::finish(const std::function<Report()>& report, const Measure&) {
  torch::NoGradGuard no_grad;
  const bool finite = compute(), sends = finite && ready();
  const Report reported = report();
  for (size_t i = 0; i < own_.size(); ++i)
    if (own_[i].is_cuda()) host_[i].copy_(own_[i]);
  StepResult result;
  timed([&] {
    result = updates_->exchange(info_.step, sends ? constant(host_) : std::vector<const float*>{}, pointers(weights_),
                                reported);
  });
  take_weights();
  // A step may be skipped by all workers, or by this worker alone while the others took it.
  result.applied = result.applied && finite;
  if (sends) exchanged(result);
  if (updates_->membership().leads && led_++ % kBufferSteps == 0) send_buffers();
  return result;
}

ExchangeStats UpdateDescent::stats() const {
  ExchangeStats stats = updates_->stats();
  stats.waited = waited_;
  return stats;
}

std::vector<ErrorFeedback*> UpdateDescent::residuals() {
  ErrorFeedback* const own = updates_->residuals();
  return own ? std::vector<ErrorFeedback*>{own} : std::vector<ErrorFeedback*>{};
}

nlohmann::json UpdateDescent::end() {
  if (updates_->membership().leads) send_buffers();
  return updates_->end();
}

void UpdateDescent::timed(const std::function<void()>& work) {
  const ScopedTimer timer(waited_);
  work();
}

void UpdateDescent::send_buffers() {
  if (buffers_.empty()) return;
  std::vector<torch::Tensor> sent;
  for (const torch::Tensor& buffer : buffers_) sent.push_back(buffer.detach().to(torch::kCPU).contiguous());
  updates_->send_buffers(constant(sent));
}

void UpdateDescent::take_weights() {
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (parameters_[i].is_cuda()) parameters_[i].copy_(weights_[i]);
}

}  // namespace gradwire::train
