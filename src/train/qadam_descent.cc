// SPDX-License-Identifier: Apache-2.0
// qadam in the training loop: see descent.h and updates.h. Gradients and moments stay where the worker computes;
// updates and weights pass through the host.
#include <fmt/format.h>
#include <torch/autograd.h>

#include <cmath>

#include "core/check.h"
#include "core/clock.h"
#include "optim/qadam.h"
#include "train/descent.h"
#include "train/optimizer.h"

namespace gradwire::train {
namespace {

constexpr const char* kTaken = "qadam.taken";
constexpr uint64_t kBufferSteps = 50;  // between two sendings of the buffers

template <class T>
std::vector<T*> pointers(const std::vector<torch::Tensor>& tensors) {
  std::vector<T*> list;
  for (const torch::Tensor& tensor : tensors) list.push_back(tensor.data_ptr<float>());
  return list;
}

std::vector<uint64_t> counts_of(const std::vector<NamedParameter>& parameters) {
  std::vector<uint64_t> counts;
  for (const NamedParameter& one : parameters) counts.push_back(static_cast<uint64_t>(one.tensor.numel()));
  return counts;
}

class QAdamDescent final : public Descent {
 public:
  QAdamDescent(const DescentParts& parts, std::unique_ptr<Updates> updates)
      : updates_(std::move(updates)),
        clip_(parts.settings.clip),
        weight_decay_(parts.settings.weight_decay),
        qadam_(counts_of(parts.parameters), parts.settings.qadam_options(), parts.compute_device()) {
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

  uint64_t start() override {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i)
      if (parameters_[i].is_cuda()) weights_[i].copy_(parameters_[i]);
    const uint64_t step = updates_->begin(pointers<float>(weights_));
    take_weights();
    std::vector<torch::Tensor> received;
    for (const torch::Tensor& buffer : buffers_) received.push_back(torch::empty_like(buffer, torch::kCPU));
    if (updates_->take_buffers(pointers<float>(received)))
      for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].copy_(received[i]);
    return step;
  }

  void begin(const StepInfo& info) override { info_ = info; }

  StepResult finish(const std::function<Report()>& report, const Measure&) override {
    torch::NoGradGuard no_grad;
    const bool finite = compute_update();
    const Report reported = report();
    for (size_t i = 0; i < own_.size(); ++i)
      if (own_[i].is_cuda()) host_[i].copy_(own_[i]);
    StepResult result;
    timed([&] {
      result = updates_->exchange(info_.step, finite ? pointers<const float>(host_) : std::vector<const float*>{},
                                  pointers<float>(weights_), reported);
    });
    if (result.applied) take_weights();
    // A step may be skipped by all workers, or by this worker alone while the others took it.
    result.applied = result.applied && finite;
    if (updates_->membership().leads && led_++ % kBufferSteps == 0) send_buffers();
    return result;
  }

  ExchangeStats stats() const override {
    ExchangeStats stats = updates_->stats();
    stats.waited = waited_;
    return stats;
  }

  DescentState state() override {
    DescentState all{.shared = {},
                     .own = {{kTaken, torch::full({1}, static_cast<int64_t>(qadam_.taken), torch::kInt64)}}};
    size_t i = 0;
    for (const std::span<float> values : updates_->held())
      all.shared[fmt::format("exact.{}", names_[i++])] =
          torch::from_blob(values.data(), {static_cast<int64_t>(values.size())}, torch::kFloat32);
    for (const QAdam::Moment moment : qadam_.moments())
      for (size_t k = 0; k < names_.size(); ++k) {
        const std::vector<float> values = qadam_.read(moment, k);
        all.own[name_of(moment, k)] = torch::tensor(values);
      }
    return all;
  }
  void restore(const DescentState& state) override {
    for (const QAdam::Moment moment : qadam_.moments())
      for (size_t i = 0; i < names_.size(); ++i) {
        const torch::Tensor& values = state.own.at(name_of(moment, i));
        qadam_.write(moment, i, {values.data_ptr<float>(), static_cast<size_t>(values.numel())});
      }
    qadam_.taken = static_cast<uint64_t>(state.own.at(kTaken).item<int64_t>());
  }
  std::vector<ErrorFeedback*> residuals() override {
    ErrorFeedback* const own = updates_->residuals();
    return own ? std::vector<ErrorFeedback*>{own} : std::vector<ErrorFeedback*>{};
  }

  WorkerPlace membership() const override { return updates_->membership(); }
  nlohmann::json end() override {
    if (updates_->membership().leads) send_buffers();
    return updates_->end();
  }

 private:
  // This worker's update, from its gradient. Returns false, and leaves the moments as they are, if it is not finite.
  bool compute_update() {
    const std::vector<torch::Tensor> gradients = gradients_of(parameters_);
    for (const torch::Tensor& gradient : gradients) GW_CHECK(gradient.defined() && gradient.is_contiguous());
    const double norm = norm_of(gradients);
    const bool finite = std::isfinite(norm / info_.loss_scale);
    if (finite) {
      if (const double factor = factor_of(norm, clip_, info_.loss_scale); factor != 1)
        torch::_foreach_mul_(gradients, factor);
      if (weight_decay_ > 0) torch::_foreach_add_(gradients, parameters_, weight_decay_);
      qadam_.step(info_.rate, pointers<const float>(gradients), pointers<float>(own_));
    }
    if (qadam_.pools(info_.step)) {
      qadam_.pool([&](std::span<float* const> second) { timed([&] { updates_->pool(info_.step, second); }); });
      if (finite) qadam_.again(info_.rate, pointers<float>(own_));
    }
    return finite;
  }
  template <class F>
  void timed(F&& work) {
    const ScopedTimer timer(waited_);
    work();
  }
  void send_buffers() {
    if (buffers_.empty()) return;
    std::vector<torch::Tensor> sent;
    for (const torch::Tensor& buffer : buffers_) sent.push_back(buffer.detach().to(torch::kCPU).contiguous());
    updates_->send_buffers(pointers<const float>(sent));
  }
  std::string name_of(QAdam::Moment moment, size_t parameter) const {
    constexpr const char* kNames[] = {"first", "second", "shared"};
    return fmt::format("qadam.{}.{}", kNames[static_cast<int>(moment)], names_[parameter]);
  }
  void take_weights() {
    for (size_t i = 0; i < parameters_.size(); ++i)
      if (parameters_[i].is_cuda()) parameters_[i].copy_(weights_[i]);
  }

  std::unique_ptr<Updates> updates_;
  double clip_, weight_decay_, waited_ = 0;
  QAdam qadam_;
  std::vector<torch::Tensor> parameters_, own_;  // own_: this worker's updates
  std::vector<torch::Tensor> host_, weights_;    // updates and weights on the host: the same memory on the CPU
  std::vector<torch::Tensor> buffers_;
  uint64_t led_ = 0;  // steps in which this worker owned the buffers
  std::vector<std::string> names_;
  StepInfo info_;
};

}  // namespace

std::unique_ptr<Descent> make_qadam_descent(const DescentParts& parts, std::unique_ptr<Updates> updates) {
  return std::make_unique<QAdamDescent>(parts, std::move(updates));
}

}  // namespace gradwire::train
