// SPDX-License-Identifier: Apache-2.0
// Workers that exchange momenta: the rule is in optim/momentum.h. Like GradientDescent it sends while gradients are
// computed; what it sends is computed from a gradient as soon as that is there.
//
// Adam's first step is exact: gradients are averaged in fp32, and the first second moments come from it. From then on
// the workers follow their own gradients and pool what they have found, less and less often.
#include <fmt/format.h>
#include <torch/autograd.h>

#include <cmath>
#include <numeric>

#include "collective/timer.h"
#include "core/check.h"
#include "core/clock.h"
#include "optim/momentum.h"
#include "train/descent.h"
#include "train/gradient_limits.h"
#include "train/momentum_tensors.h"

namespace gradwire::train {
namespace {

constexpr const char* kCounts = "momentum.counts";  // steps taken, at the last pooling, at the next one

MomentumOptions options_of(const DescentParts& parts) {
  const Settings& s = parts.settings;
  return {
      .adam = s.adam_options(), .adaptive = s.optimizer != "sgd", .momentum = s.momentum, .world = parts.engine.size()};
}

class MomentumDescent final : public Descent {
 public:
  explicit MomentumDescent(const DescentParts& parts)
      : engine_(parts.engine),
        control_(parts.control),
        clip_(parts.settings.clip),
        adaptive_(parts.settings.optimizer != "sgd"),
        t_(tensors_of(parts.parameters), zeros_like(tensors_of(parts.parameters)), adaptive_),
        limits_(t_.weights.size(), clip_, t_.weights.at(0).device()),
        optimizer_(t_.arrays(), options_of(parts), with_torch_threads(parts.compute_device())) {
    ReduceOptions options = parts.reduce_options();
    options.device = parts.codec_device;
    const SentValues sent{t_.values, [this](std::span<const size_t> some) { propose(some); }};
    exchange_ = std::make_unique<Exchange>(parts.engine, parts.parameters, options, parts.settings.bucket_mb * 1e6,
                                           parts.stream, sent, parts.settings.first_steps_of(parts.steps));
    if (!adaptive_) return;
    options.method = ReduceOptions::Method::scatter;
    options.feedback = options.owner_feedback = ReduceOptions::Feedback::off;  // moments are not a sum of steps
    options.residual = DType::f32;  // there are none, and what is said of them would be refused
    options.decay = 1;
    options.device.stream = parts.compute_device().stream;
    std::vector<NamedTensor> tensors;
    for (const NamedParameter& one : parts.parameters) tensors.push_back(describe(one));
    options.up = options.down = "fp32";
    exact_ = std::make_unique<Reducer>(engine_, tensors, options);
    options.up = options.down = "bf16";
    pool_ = std::make_unique<Reducer>(engine_, tensors, options);
  }

  void begin(const StepInfo& info) override {
    info_ = info;
    if (!optimizer_.exact()) exchange_->begin(info.step, 1, info.rate, !info.metered);
  }

  StepResult finish(const std::function<Report()>& report, const Measure& measure) override {
    torch::NoGradGuard no_grad;
    const bool exact = optimizer_.exact();
    const uint64_t pooled = optimizer_.counts.pooled;
    const bool applied = exact ? take_exact(report) : take(report, measure);
    bits_ = (exact ? 32 : exchange_->bits()) + (optimizer_.counts.pooled > pooled ? 16 : 0);
    return {.next = info_.step + 1, .applied = applied};
  }

  ExchangeStats stats() const override {
    ExchangeStats all{.bits = bits_,
                      .bytes_sent = engine_.bytes_sent() - control_.bytes_sent(),
                      .waited = waited_,
                      .times = exchange_->times(),
                      .memory = exchange_->memory(),
                      .buckets = exchange_->buckets()};
    for (const Reducer* const reducer : {exact_.get(), pool_.get()}) {
      if (!reducer) continue;
      all.times += reducer->times();
      all.memory.messages += reducer->memory().messages;
    }
    for (const torch::Tensor& one : t_.values) all.memory.sums += one.nbytes();
    return all;
  }
  std::vector<Exchange::Learned> learned() const override { return exchange_->learned(); }

  DescentState state() override {
    DescentState all;
    const MomentumOptimizer::Counts& counts = optimizer_.counts;
    all.shared[kCounts] = torch::tensor(
        {static_cast<int64_t>(counts.taken), static_cast<int64_t>(counts.pooled), static_cast<int64_t>(counts.next)});
    const auto add = [](TensorMap& map, const char* name, const std::vector<torch::Tensor>& arrays) {
      for (size_t i = 0; i < arrays.size(); ++i) map[fmt::format("momentum.{}.{:05}", name, i)] = arrays[i];
    };
    add(all.shared, "first", t_.first);
    add(all.shared, "second", t_.second);
    add(all.own, "own_first", t_.own_first);
    add(all.own, "own_second", t_.own_second);
    all.own["momentum.levels"] = limits_.levels();
    return all;
  }
  void restore(const DescentState& state) override {
    const torch::Tensor& counts = state.shared.at(kCounts);
    const auto count = [&](int i) { return static_cast<uint64_t>(counts[i].item<int64_t>()); };
    optimizer_.counts = {.taken = count(0), .pooled = count(1), .next = count(2)};
  }
  std::vector<ErrorFeedback*> residuals() override { return exchange_->residuals(); }

 private:
  using Tensors = std::vector<torch::Tensor>;

  // Of some parameters, or of all.
  std::vector<const float*> gradients(std::span<const size_t> some) const {
    std::vector<const float*> list;
    for (const size_t i : some) list.push_back(gradient(i));
    return list;
  }
  std::vector<const float*> gradients() const {
    std::vector<const float*> list;
    for (size_t i = 0; i < t_.weights.size(); ++i) list.push_back(gradient(i));
    return list;
  }
  const float* gradient(size_t parameter) const {
    const torch::Tensor& gradient = t_.weights[parameter].grad();
    GW_CHECK(gradient.defined() && gradient.is_contiguous());
    return gradient.data_ptr<float>();
  }
  double unscaled() const { return 1 / info_.loss_scale; }

  void limit(std::span<const size_t> some) {
    Tensors list;
    for (const size_t i : some) list.push_back(t_.weights[i].grad());
    limits_.apply(some, list, info_.loss_scale);
  }

  void propose(std::span<const size_t> some) {
    limit(some);
    optimizer_.propose(some, gradients(some), unscaled());
  }

  bool take(const std::function<Report()>& report, const Measure& measure) {
    Tensors exact;
    if (info_.metered) {
      optimizer_.propose(gradients(), unscaled());
      exact = exchange_->exact_means(control_.engine(), info_.step);
    }
    {
      const ScopedTimer timer(waited_);
      exchange_->finish();
    }
    report();
    if (info_.metered) measure(exact, t_.values);
    optimizer_.to_momenta();
    // All workers hold the same means, so all of them decide alike.
    const double norm = norm_of(t_.values);
    if (!std::isfinite(norm)) {
      exchange_->rollback();
      return false;
    }
    // Adam's momentum is a mean of gradients and has their norm at most; SGD's is a sum of them.
    optimizer_.step(gradients(), unscaled(), info_.rate, adaptive_ ? factor_of(norm, clip_, 1) : 1);
    limits_.commit();
    exchange_->commit();
    pool();
    return true;
  }

  bool take_exact(const std::function<Report()>& report) {
    average(*exact_, gradients_of(t_.weights), t_.values);
    report();
    const double norm = norm_of(t_.values);
    if (!std::isfinite(norm / info_.loss_scale)) return false;
    std::vector<size_t> all(t_.weights.size());
    std::iota(all.begin(), all.end(), size_t{0});
    limit(all);
    limits_.commit();
    optimizer_.exact_step(gradients(), unscaled(), info_.rate, factor_of(norm, clip_, info_.loss_scale));
    pool();
    return true;
  }

  void pool() {
    if (!optimizer_.pools()) return;
    average(*pool_, t_.own_second, t_.second);
    for (const torch::Tensor& one : t_.second) {
      const torch::Tensor host = one.to(torch::kCPU);
      MomentumOptimizer::lift({host.data_ptr<float>(), static_cast<size_t>(host.numel())});
      if (one.is_cuda()) one.copy_(host);
    }
    optimizer_.pooled();
  }

  void average(Reducer& reducer, const Tensors& from, const Tensors& to) {
    const ScopedTimer timer(waited_);
    std::vector<const void*> in;
    std::vector<void*> out;
    for (const torch::Tensor& one : from) in.push_back(one.data_ptr());
    for (const torch::Tensor& one : to) out.push_back(one.data_ptr());
    reducer.run(info_.step, in, out);
  }

  Engine& engine_;
  Control& control_;
  double clip_, waited_ = 0;
  double bits_ = 0;  // of the last step
  bool adaptive_;    // not SGD
  MomentumTensors t_;
  GradientLimits limits_;
  MomentumOptimizer optimizer_;
  std::unique_ptr<Exchange> exchange_;
  std::unique_ptr<Reducer> exact_, pool_;
  StepInfo info_;
};

}  // namespace

std::unique_ptr<Descent> make_momentum_descent(const DescentParts& parts) {
  return std::make_unique<MomentumDescent>(parts);
}

}  // namespace gradwire::train
