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
#include "train/optimizer.h"
#include "train/update_descent.h"

namespace gradwire::train {
namespace {

constexpr uint64_t kCorrected = uint64_t{1} << 62;  // steps after which no bias of young moments is left

std::vector<torch::Tensor> zeros(const std::vector<torch::Tensor>& like) {
  std::vector<torch::Tensor> list;
  for (const torch::Tensor& one : like) list.push_back(torch::zeros_like(one, torch::MemoryFormat::Contiguous));
  return list;
}

class MomentumUpdateDescent final : public UpdateDescent {
 public:
  MomentumUpdateDescent(const DescentParts& parts, std::unique_ptr<Updates> updates, std::vector<torch::Tensor> second)
      : UpdateDescent(parts, std::move(updates)),
        second_(std::move(second)),
        first_(zeros(second_)),
        own_first_(zeros(second_)),
        own_second_(zeros(second_)),
        before_(zeros(second_)),
        optimizer_(arrays(), options_of(parts), with_torch_threads(parts.compute_device())),
        adam_(options_of(parts).adam) {
    for (size_t i = 0; i < second_.size(); ++i) all_.push_back(i);
    optimizer_.counts.pooled = kCorrected;
  }

  uint64_t start() override {
    const uint64_t step = UpdateDescent::start();
    // Moments that came as buffers are those that this worker would have found by itself.
    known_ =
        std::any_of(second_.begin(), second_.end(), [](const auto& one) { return one.any().template item<bool>(); });
    if (!known_) return step;
    optimizer_.counts.taken = step;
    const double young = 1 - std::pow(adam_.beta2, static_cast<double>(step));
    for (size_t i = 0; i < second_.size(); ++i) own_second_[i].copy_(second_[i] * young);
    return step;
  }
  // A server holds the weights, and workers have no checkpoints.
  DescentState state() override { return {}; }
  void restore(const DescentState&) override {}

 private:
  static MomentumOptions options_of(const DescentParts& parts) {
    const Settings& s = parts.settings;
    return {.adam = {.weight_decay = s.weight_decay, .decoupled = s.optimizer == "adamw"}, .world = s.workers};
  }
  std::vector<MomentumOptimizer::Arrays> arrays() const {
    std::vector<MomentumOptimizer::Arrays> list;
    for (size_t i = 0; i < second_.size(); ++i)
      list.push_back({.weights = parameters()[i].data_ptr<float>(),
                      .values = own()[i].data_ptr<float>(),
                      .first = first_[i].data_ptr<float>(),
                      .second = second_[i].data_ptr<float>(),
                      .own_first = own_first_[i].data_ptr<float>(),
                      .own_second = own_second_[i].data_ptr<float>(),
                      .count = static_cast<uint64_t>(second_[i].numel())});
    return list;
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
    optimizer_.propose(all_, constant(*gradients), 1);
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
    for (const torch::Tensor& one : own_second_) host.push_back((one / young).to(torch::kCPU));
    timed([&] { updates().pool(info().step, pointers(host)); });
    for (size_t i = 0; i < host.size(); ++i) {
      MomentumOptimizer::lift({host[i].data_ptr<float>(), static_cast<size_t>(host[i].numel())});
      second_[i].copy_(host[i]);
    }
    known_ = true;
  }

  void exchanged(const StepResult& result) override {
    const double rate = corrected_rate();
    if (!result.applied || rate <= 0) return;
    const auto steps = static_cast<double>(std::max<uint64_t>(1, result.next - info().step));  // more if it was late
    for (size_t i = 0; i < second_.size(); ++i) {
      const torch::Tensor mean = (before_[i] * (1 - decay()) - parameters()[i]) / (rate * steps);
      own()[i].copy_(mean.clamp(-kLargestUpdate, kLargestUpdate));
    }
    optimizer_.to_momenta();
    torch::_foreach_copy_(first_, own());
  }

  std::vector<torch::Tensor> second_, first_, own_first_, own_second_, before_;
  std::vector<size_t> all_;
  MomentumOptimizer optimizer_;
  AdamOptions adam_;
  bool known_ = false;  // there are second moments
  uint64_t next_ = 1;   // the next pooling is after so many steps of the run
};

}  // namespace

std::vector<NamedParameter> moment_buffers(const std::vector<NamedParameter>& parameters) {
  std::vector<NamedParameter> list;
  for (const NamedParameter& one : parameters)
    list.push_back({fmt::format("second_moment.{}", one.name),
                    torch::zeros_like(one.tensor, torch::MemoryFormat::Contiguous).detach()});
  return list;
}

std::unique_ptr<Descent> make_momentum_update_descent(const DescentParts& parts, std::unique_ptr<Updates> updates,
                                                      const std::vector<NamedParameter>& moments) {
  return std::make_unique<MomentumUpdateDescent>(parts, std::move(updates), tensors_of(moments));
}

}  // namespace gradwire::train
