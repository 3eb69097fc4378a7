// SPDX-License-Identifier: Apache-2.0
// qadam in the training loop: see update_descent.h. Moments stay where the worker computes.
#include <fmt/format.h>
#include <torch/autograd.h>

#include "optim/qadam.h"
#include "train/update_descent.h"

namespace gradwire::train {
namespace {

constexpr const char* kTaken = "qadam.taken";

std::vector<uint64_t> counts_of(const std::vector<NamedParameter>& parameters) {
  std::vector<uint64_t> counts;
  for (const NamedParameter& one : parameters) counts.push_back(static_cast<uint64_t>(one.tensor.numel()));
  return counts;
}

class QAdamDescent final : public UpdateDescent {
 public:
  QAdamDescent(const DescentParts& parts, std::unique_ptr<Updates> updates)
      : UpdateDescent(parts, std::move(updates)),
        weight_decay_(parts.settings.weight_decay),
        qadam_(counts_of(parts.parameters), parts.settings.qadam_options(), parts.compute_device()) {}

  DescentState state() override {
    DescentState all{.shared = {},
                     .own = {{kTaken, torch::full({1}, static_cast<int64_t>(qadam_.taken), torch::kInt64)}}};
    size_t i = 0;
    for (const std::span<float> values : updates().held())
      all.shared[fmt::format("exact.{}", names()[i++])] =
          torch::from_blob(values.data(), {static_cast<int64_t>(values.size())}, torch::kFloat32);
    for (const QAdam::Moment moment : qadam_.moments())
      for (size_t k = 0; k < names().size(); ++k) {
        const std::vector<float> values = qadam_.read(moment, k);
        all.own[name_of(moment, k)] = torch::tensor(values);
      }
    return all;
  }
  void restore(const DescentState& state) override {
    for (const QAdam::Moment moment : qadam_.moments())
      for (size_t i = 0; i < names().size(); ++i) {
        const torch::Tensor& values = state.own.at(name_of(moment, i));
        qadam_.write(moment, i, {values.data_ptr<float>(), static_cast<size_t>(values.numel())});
      }
    qadam_.taken = static_cast<uint64_t>(state.own.at(kTaken).item<int64_t>());
  }

 private:
  // Without gradients the moments stay as they are.
  void compute_update(const std::vector<torch::Tensor>* gradients) override {
    if (gradients) {
      if (weight_decay_ > 0) torch::_foreach_add_(*gradients, parameters(), weight_decay_);
      qadam_.step(info().rate, constant(*gradients), pointers(own()));
    }
    if (!qadam_.pools(info().step)) return;
    qadam_.pool([&](std::span<float* const> second) { timed([&] { updates().pool(info().step, second); }); });
    if (gradients) qadam_.again(info().rate, pointers(own()));
  }
  std::string name_of(QAdam::Moment moment, size_t parameter) const {
    constexpr const char* kNames[] = {"first", "second", "shared"};
    return fmt::format("qadam.{}.{}", kNames[static_cast<int>(moment)], names()[parameter]);
  }

  double weight_decay_;
  QAdam qadam_;
};

}  // namespace

std::unique_ptr<Descent> make_qadam_descent(const DescentParts& parts, std::unique_ptr<Updates> updates) {
  return std::make_unique<QAdamDescent>(parts, std::move(updates));
}

}  // namespace gradwire::train
