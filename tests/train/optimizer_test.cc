// SPDX-License-Identifier: Apache-2.0
// The optimiser of a worker against torch.optim: the same steps to rounding, in single and in double precision; and
// what a checkpoint keeps of it is all that it has.
#include "train/optimizer.h"

#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

namespace gradwire::train {
namespace {

constexpr double kLearningRate = 0.01;

// Weights of two shapes, the same for every call.
std::vector<torch::Tensor> make_weights(torch::ScalarType type) {
  torch::manual_seed(3);
  std::vector<torch::Tensor> list{torch::randn({17, 33}), torch::randn({5})};
  for (torch::Tensor& one : list) one = one.to(type).requires_grad_();
  return list;
}

void set_gradients(std::vector<torch::Tensor>& weights, int step) {
  torch::manual_seed(static_cast<uint64_t>(100 + step));
  for (torch::Tensor& one : weights)
    one.mutable_grad() = (torch::randn(one.sizes()) * std::pow(10, step % 4 - 2)).to(one.scalar_type());
}

std::unique_ptr<torch::optim::Optimizer> torch_optimizer(const Settings& s, const std::vector<torch::Tensor>& weights) {
  if (s.optimizer == "sgd")
    return std::make_unique<torch::optim::SGD>(
        weights, torch::optim::SGDOptions(kLearningRate).momentum(s.momentum).weight_decay(s.weight_decay));
  if (s.optimizer == "adam")
    return std::make_unique<torch::optim::Adam>(weights,
                                                torch::optim::AdamOptions(kLearningRate).weight_decay(s.weight_decay));
  return std::make_unique<torch::optim::AdamW>(weights,
                                               torch::optim::AdamWOptions(kLearningRate).weight_decay(s.weight_decay));
}

std::vector<Settings> all_settings() {
  std::vector<Settings> list;
  for (const char* optimizer : {"sgd", "adam", "adamw"})
    for (const double momentum : {0.0, 0.9})
      for (const double decay : {0.0, 0.1}) {
        Settings settings;
        settings.optimizer = optimizer;
        settings.momentum = momentum;
        settings.weight_decay = decay;
        list.push_back(settings);
      }
  return list;
}

TEST(Optimizer, TakesTheStepsOfTorch) {
  for (const Settings& settings : all_settings())
    for (const torch::ScalarType type : {torch::kFloat32, torch::kFloat64}) {
      std::vector<torch::Tensor> ours = make_weights(torch::kFloat32), theirs = make_weights(type);
      Optimizer optimizer(settings, ours, Device{});
      const auto reference = torch_optimizer(settings, theirs);
      for (int step = 0; step < 50; ++step) {
        set_gradients(ours, step);
        set_gradients(theirs, step);
        optimizer.step(kLearningRate, 1);
        reference->step();
      }
      for (size_t i = 0; i < ours.size(); ++i)
        EXPECT_TRUE(torch::allclose(ours[i].to(torch::kFloat64), theirs[i].to(torch::kFloat64), 2e-5, 2e-6))
            << settings.optimizer << ", momentum " << settings.momentum << ", decay " << settings.weight_decay << ", "
            << torch::toString(type);
    }
}

TEST(Optimizer, GoesOnFromTheStateThatWasKept) {
  for (const Settings& settings : all_settings()) {
    std::vector<torch::Tensor> whole = make_weights(torch::kFloat32), first = make_weights(torch::kFloat32);
    Optimizer straight(settings, whole, Device{}), before(settings, first, Device{});
    for (int step = 0; step < 10; ++step) {
      set_gradients(whole, step);
      straight.step(kLearningRate, 0.5);
      if (step >= 5) continue;
      set_gradients(first, step);
      before.step(kLearningRate, 0.5);
    }
    std::vector<torch::Tensor> second;
    for (const torch::Tensor& one : first) second.push_back(one.detach().clone().requires_grad_());
    Optimizer after(settings, second, Device{});
    ASSERT_EQ(after.state().size(), before.state().size());
    for (size_t i = 0; i < after.state().size(); ++i) torch::Tensor(after.state()[i]).copy_(before.state()[i]);
    after.steps = before.steps;
    for (int step = 5; step < 10; ++step) {
      set_gradients(second, step);
      after.step(kLearningRate, 0.5);
    }
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(torch::equal(whole[i], second[i])) << settings.optimizer;
  }
}

}  // namespace
}  // namespace gradwire::train
