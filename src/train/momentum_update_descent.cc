// SPDX-License-Identifier: Apache-2.0
// Adam and AdamW with a parameter server: see update_descent.h, and optim/momentum.h for the rule. A worker sends
//
//   rate / (1 - beta1^k) * u + rate * decay * w                       k: the step of the run, from 1
//
// and the server subtracts the mean of what the workers send from the weights. The residual is in units of the weights,
// so the server needs to know nothing of the rule. What came back as a change of the weights tells the worker the mean
// of u, and with it the momentum of all workers.
//
// Second moments are pooled by the server before the step in which they are used, from the first step on. The worker
// that leads also gives them to the server as buffers, so that one that joins has them at once. Its momentum is zero in
// its first step.
#include <fmt/format.h>
#include <torch/autograd.h>

#include <algorithm>
#include <cmath>

#include "optim/momentum.h"
#include "train/momentum_tensors.h"
#include "train/update_descent.h"

namespace gradwire::train {
namespace {

constexpr uint64_t kCorrected = uint64_t{1} << 62;  // steps after which no bias of young moments is left

class MomentumUpdateDescent final : public UpdateDescent {
 public:
  MomentumUpdateDescent(const DescentParts& parts, std::unique_ptr<Updates> updates, std::vector<torch::Tensor> second)
      : UpdateDescent(parts, std::move(updates)),
        t_(parameters(), own(), true),
        before_(zeros_like(parameters())),
        adam_(parts.settings.adam_options()),
        optimizer_(with_second(std::move(second)), {.adam = adam_, .world = parts.settings.workers},
                   with_torch_threads(parts.compute_device())) {
    optimizer_.counts.pooled = kCorrected;
  }

  uint64_t start() override {
    const uint64_t step = UpdateDescent::start();
    // Moments that came as buffers are those that this worker would have found by itself.
    known_ = std::any_of(t_.second.begin(), t_.second.end(),
                         [](const auto& one) { return one.any().template item<bool>(); });
    if (!known_) return step;
    optimizer_.counts.taken = step;
    const double young = 1 - std::pow(adam_.beta2, static_cast<double>(step));
    for (size_t i = 0; i < t_.second.size(); ++i) t_.own_second[i].copy_(t_.second[i] * young);
    return step;
  }
  // A server holds the weights, and workers have no checkpoints.
  DescentState state() override { return {}; }
  void restore(const DescentState&) override {}

 private:
  std::vector<MomentumOptimizer::Arrays> with_second(std::vector<torch::Tensor> second) {
    t_.second = std::move(second);
    return t_.arrays();
  }

  double corrected_rate() const {
    return info().rate / (1 - std::pow(adam_.beta1, static_cast<double>(info().step + 1)));
  }
  double decay() const { return adam_.decoupled ? info().rate * adam_.weight_decay : 0; }

  bool ready() const override { return known_; }

  void compute_update(const std::vector<torch::Tensor>* gradients) override {
    if (gradients) {
      optimizer_.follow(constant(*gradients), 1);
      ++optimizer_.counts.taken;
    }
    if (pools()) pool();
    if (!gradients || !known_) return;
    optimizer_.propose(constant(*gradients), 1);
    torch::_foreach_mul_(own(), corrected_rate());
    if (decay() > 0) torch::_foreach_add_(own(), parameters(), decay());
    torch::_foreach_copy_(before_, parameters());
  }

  // All workers pool in the same steps of the run, also those whose gradient is not finite.
  bool pools() {
    while (next_ < info().step + 1) next_ = next_pooling(next_);
    return next_ == info().step + 1;
  }

  void pool() {
    const double young = 1 - std::pow(adam_.beta2, static_cast<double>(std::max<uint64_t>(1, optimizer_.counts.taken)));
    std::vector<torch::Tensor> host;
    for (const torch::Tensor& one : t_.own_second) host.push_back((one / young).to(torch::kCPU));
    timed([&] { updates().pool(info().step, pointers(host)); });
    for (size_t i = 0; i < host.size(); ++i) {
      MomentumOptimizer::lift({host[i].data_ptr<float>(), static_cast<size_t>(host[i].numel())});
      t_.second[i].copy_(host[i]);
    }
    known_ = true;
  }

  void exchanged(const StepResult& result) override {
    const double rate = corrected_rate();
    if (!result.applied || rate <= 0) return;
    const auto steps = static_cast<double>(std::max<uint64_t>(1, result.next - info().step));  // more if it was late
    for (size_t i = 0; i < t_.second.size(); ++i) {
      const torch::Tensor mean = (before_[i] * (1 - decay()) - parameters()[i]) / (rate * steps);
      own()[i].copy_(mean.clamp(-kLargestUpdate, kLargestUpdate));
    }
    optimizer_.to_momenta();
    torch::_foreach_copy_(t_.first, own());
  }

  MomentumTensors t_;
  std::vector<torch::Tensor> before_;  // the weights that the update was computed at
  AdamOptions adam_;
  MomentumOptimizer optimizer_;
  bool known_ = false;  // there are second moments
  uint64_t next_ = 1;   // the next pooling is after so many steps of the run
};

}  // namespace

std::vector<NamedParameter> moment_buffers(const std::vector<NamedParameter>& parameters) {
  std::vector<torch::Tensor> zeros = zeros_like(tensors_of(parameters));
  std::vector<NamedParameter> list;
  for (size_t i = 0; i < parameters.size(); ++i)
    list.push_back({fmt::format("second_moment.{}", parameters[i].name), std::move(zeros[i])});
  return list;
}

std::unique_ptr<Descent> make_momentum_update_descent(const DescentParts& parts, std::unique_ptr<Updates> updates,
                                                      const std::vector<NamedParameter>& moments) {
  return std::make_unique<MomentumUpdateDescent>(parts, std::move(updates), tensors_of(moments));
}

}  // namespace gradwire::train
