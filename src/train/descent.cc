// SPDX-License-Identifier: Apache-2.0
// GradientDescent, and the choice between it and the others: see descent.h.
#include "train/descent.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>

#include "core/clock.h"
#include "gradwire/error.h"
#include "train/mean_updates.h"
#include "train/optimizer.h"
#include "train/update_descent.h"
#ifdef GRADWIRE_HAS_GRPC
#include "train/server_updates.h"
#endif

namespace gradwire::train {
namespace {

constexpr const char* kSteps = "optimizer.steps";

#ifdef GRADWIRE_HAS_GRPC
std::vector<server::Variable> variables_of(const std::vector<NamedParameter>& tensors) {
  std::vector<server::Variable> list;
  for (const NamedParameter& one : tensors) list.push_back({one.name, one.tensor.sizes().vec()});
  return list;
}
#endif

class GradientDescent final : public Descent {
 public:
  explicit GradientDescent(const DescentParts& parts)
      : engine_(parts.engine),
        control_(parts.control),
        clip_(parts.settings.clip),
        optimizer_(parts.settings, tensors_of(parts.parameters), parts.compute_device()) {
    ReduceOptions options = parts.reduce_options();
    options.device = parts.codec_device;
    exchange_ = std::make_unique<Exchange>(parts.engine, parts.parameters, options, parts.settings.bucket_mb * 1e6,
                                           parts.stream);
  }

  void begin(const StepInfo& info) override {
    info_ = info;
    exchange_->begin(info.step, info.loss_scale, info.rate, !info.metered);
  }

  StepResult finish(const std::function<Report()>& report, const Measure& measure) override {
    std::vector<torch::Tensor> exact;
    if (info_.metered) exact = exchange_->exact_means(control_.engine(), info_.step);
    {
      const ScopedTimer timer(waited_);
      exchange_->finish();
    }
    report();
    if (info_.metered) measure(exact, gradients_of(optimizer_.parameters()));
    // All workers hold the same means, so all of them decide alike.
    const double norm = norm_of(gradients_of(optimizer_.parameters()));
    const bool finite = std::isfinite(norm / info_.loss_scale);
    if (finite) {
      optimizer_.step(info_.rate, factor_of(norm, clip_, info_.loss_scale));
      exchange_->commit();
    } else {
      exchange_->rollback();
    }
    return {.next = info_.step + 1, .applied = finite};
  }

  ExchangeStats stats() const override {
    return {.bits = exchange_->bits(),
            .bytes_sent = engine_.bytes_sent() - control_.bytes_sent(),
            .waited = waited_,
            .times = exchange_->times(),
            .memory = exchange_->memory(),
            .buckets = exchange_->buckets()};
  }
  std::vector<Exchange::Learned> learned() const override { return exchange_->learned(); }

  DescentState state() override {
    TensorMap all{{kSteps, torch::full({1}, optimizer_.steps, torch::kInt64)}};
    for (size_t i = 0; i < optimizer_.state().size(); ++i)
      all[fmt::format("optimizer.{:05}", i)] = optimizer_.state()[i];
    return {.shared = all, .own = {}};
  }
  void restore(const DescentState& state) override { optimizer_.steps = state.shared.at(kSteps).item<int64_t>(); }
  std::vector<ErrorFeedback*> residuals() override { return exchange_->residuals(); }

 private:
  Engine& engine_;
  Control& control_;
  double clip_, waited_ = 0;
  Optimizer optimizer_;
  std::unique_ptr<Exchange> exchange_;
  StepInfo info_;
};

}  // namespace

std::vector<torch::Tensor> tensors_of(const std::vector<NamedParameter>& parameters) {
  std::vector<torch::Tensor> list;
  for (const NamedParameter& one : parameters) list.push_back(one.tensor);
  return list;
}

ReduceOptions DescentParts::reduce_options() const {
  ReduceOptions options = settings.reduce_options();
  options.steps = steps;
  return options;
}

Device DescentParts::compute_device() const {
  Device device = codec_device;
  if (stream) device.stream = stream->native_handle();
  return device;
}

std::unique_ptr<Descent> make_descent(const DescentParts& parts) {
  if (parts.server) {
#ifdef GRADWIRE_HAS_GRPC
    auto updates = std::make_unique<ServerUpdates>(parts.settings, parts.steps, *parts.server,
                                                   variables_of(parts.parameters), variables_of(parts.buffers));
    return parts.settings.optimizer == "sgd" ? make_sgd_descent(parts, std::move(updates))
                                             : make_qadam_descent(parts, std::move(updates));
#else
    throw Error(ErrorKind::unsupported,
                "--server needs gRPC, which this build did not find: install libgrpc++-dev and build again", "server");
#endif
  }
  if (parts.settings.exchanges_momenta()) return make_momentum_descent(parts);
  if (parts.settings.optimizer != "qadam") return std::make_unique<GradientDescent>(parts);
  std::vector<NamedTensor> tensors;
  for (const NamedParameter& one : parts.parameters) tensors.push_back(describe(one));
  const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(1000 * parts.timeout));
  return make_qadam_descent(parts, std::make_unique<MeanUpdates>(parts.engine, std::move(tensors),
                                                                 parts.reduce_options(), parts.settings.down, timeout));
}

}  // namespace gradwire::train
