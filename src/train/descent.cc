// SPDX-License-Identifier: Apache-2.0
// Gradients that are exchanged, and who makes which descent: see descent.h.
#include "train/descent.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>

#include "gradwire/error.h"
#include "train/clock.h"
#include "train/mean_updates.h"
#include "train/optimizer.h"
#ifdef GRADWIRE_HAS_GRPC
#include "train/server_updates.h"
#endif

namespace gradwire::train {
namespace {

constexpr const char* kSteps = "optimizer.steps";

std::vector<torch::Tensor> tensors_of(const std::vector<NamedParameter>& parameters) {
  std::vector<torch::Tensor> list;
  for (const NamedParameter& one : parameters) list.push_back(one.tensor);
  return list;
}

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
    ReduceOptions options = parts.settings.reduce_options();
    options.device = parts.codec_device;
    exchange_ = std::make_unique<Exchange>(parts.engine, parts.parameters, options, parts.settings.bucket_mb * 1e6,
                                           parts.stream);
  }

  uint64_t start() override { return 0; }

  void begin(const Now& now) override {
    now_ = now;
    exchange_->begin(now.step, now.loss_scale, now.rate, !now.metered);
  }

  void exchange(const std::function<Report()>& report) override {
    exact_.clear();
    if (now_.metered) exact_ = exchange_->exact_means(control_.engine(), now_.step);
    const double sending = wall_seconds();
    exchange_->finish();
    waited_ += wall_seconds() - sending;
    report();
  }

  const std::vector<torch::Tensor>& exact_means() const override { return exact_; }

  // All workers hold the same means, so all decide alike.
  Taken apply() override {
    const double norm = norm_of(gradients_of(optimizer_.parameters()));
    const bool finite = std::isfinite(norm / now_.loss_scale);
    if (finite) {
      optimizer_.step(now_.rate, factor_of(norm, clip_, now_.loss_scale));
      exchange_->commit();
    } else {
      exchange_->rollback();
    }
    return {.next = now_.step + 1, .applied = finite};
  }

  double bits() const override { return exchange_->bits(); }
  uint64_t bytes_sent() const override { return engine_.bytes_sent() - control_.bytes_sent(); }
  ReduceTimes times() const override { return exchange_->times(); }
  ReduceMemory memory() const override { return exchange_->memory(); }
  std::vector<Exchange::Learned> learned() const override { return exchange_->learned(); }
  size_t buckets() const override { return exchange_->buckets(); }

  TensorMap shared_state() override {
    TensorMap all{{kSteps, torch::full({1}, optimizer_.steps, torch::kInt64)}};
    for (size_t i = 0; i < optimizer_.state().size(); ++i)
      all[fmt::format("optimizer.{:05}", i)] = optimizer_.state()[i];
    return all;
  }
  TensorMap own_state() override { return {}; }
  void restore(const TensorMap& shared, const TensorMap&) override {
    optimizer_.steps = shared.at(kSteps).item<int64_t>();
  }
  void save_residuals(size_t bucket, const std::string& path) const override { exchange_->feedback(bucket).save(path); }
  void load_residuals(size_t bucket, const std::string& path) override { exchange_->load_feedback(bucket, path); }

 private:
  Engine& engine_;
  Control& control_;
  double clip_;
  Optimizer optimizer_;
  std::unique_ptr<Exchange> exchange_;
  std::vector<torch::Tensor> exact_;
  Now now_;
};

}  // namespace

Device DescentParts::compute_device() const {
  Device device = codec_device;
  if (stream) device.stream = stream->native_handle();
  return device;
}

std::unique_ptr<Descent> make_descent(const DescentParts& parts) {
  if (parts.settings.optimizer != "qadam") return std::make_unique<GradientDescent>(parts);
  if (parts.server) {
#ifdef GRADWIRE_HAS_GRPC
    return make_qadam_descent(
        parts, std::make_unique<ServerUpdates>(parts.settings, *parts.server, variables_of(parts.parameters),
                                               variables_of(parts.buffers)));
#else
    throw Error(ErrorKind::unsupported,
                "--server needs gRPC, which this build did not find: install libgrpc++-dev and build again", "server");
#endif
  }
  std::vector<NamedTensor> tensors;
  for (const NamedParameter& one : parts.parameters) tensors.push_back(describe(one));
  const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(1000 * parts.timeout));
  return make_qadam_descent(
      parts, std::make_unique<MeanUpdates>(parts.engine, std::move(tensors), parts.settings.reduce_options(),
                                           parts.settings.down, timeout));
}

}  // namespace gradwire::train
