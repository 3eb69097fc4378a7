// SPDX-License-Identifier: Apache-2.0
// Clipping by shares: the norm stays below the clip whatever comes, ordinary gradients are left alone, and limits
// follow a training whose gradients change.
#include "train/gradient_limits.h"

#include <gtest/gtest.h>
#include <torch/autograd.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "train/optimizer.h"

namespace gradwire::train {
namespace {

using Tensors = std::vector<torch::Tensor>;

const std::vector<double> kSizes = {1.0, 0.3, 0.02, 0.5};  // norms of the parameters, relative to each other

Tensors gradients(double norm) {
  Tensors list;
  for (const double size : kSizes) {
    const torch::Tensor noise = torch::randn({64});
    list.push_back(noise / noise.norm() * size * norm * (0.8 + 0.4 * torch::rand({1}).item<double>()));
  }
  return list;
}

std::vector<size_t> all_of(const Tensors& list) {
  std::vector<size_t> all(list.size());
  std::iota(all.begin(), all.end(), size_t{0});
  return all;
}

// As a backward pass does: the last parameters first, in two buckets.
void apply_in_buckets(GradientLimits& limits, const Tensors& list, double loss_scale = 1) {
  limits.apply(std::vector<size_t>{2, 3}, {list[2], list[3]}, loss_scale);
  limits.apply(std::vector<size_t>{0, 1}, {list[0], list[1]}, loss_scale);
}

TEST(GradientLimits, TheFirstGradientIsClippedByItsNorm) {
  torch::manual_seed(1);
  GradientLimits limits(kSizes.size(), 0.5, torch::kCPU);
  const Tensors raw = gradients(7);
  Tensors clipped;
  for (const torch::Tensor& one : raw) clipped.push_back(one.clone());
  limits.apply(all_of(clipped), clipped, 1);
  const double factor = 0.5 / norm_of(raw);
  for (size_t i = 0; i < raw.size(); ++i) EXPECT_TRUE(torch::allclose(clipped[i], raw[i] * factor));
}

TEST(GradientLimits, NoClipChangesNothing) {
  GradientLimits limits(kSizes.size(), 0, torch::kCPU);
  const Tensors raw = gradients(1e6);
  const torch::Tensor before = raw[0].clone();
  limits.apply(all_of(raw), raw, 1);
  limits.commit();
  EXPECT_TRUE(torch::equal(raw[0], before));
}

// 1,000 steps in which the typical norm changes by a factor of 100, with spikes of 50 times a gradient in all
// parameters or in one. A clip of the averaged momentum would let a tenth of a spike through, five times the limit.
TEST(GradientLimits, TheNormStaysBelowTheClipInALongRun) {
  for (const uint64_t seed : {1, 2, 3}) {
    torch::manual_seed(seed);
    GradientLimits limits(kSizes.size(), 1, torch::kCPU);
    int left_alone = 0, ordinary = 0;
    for (int step = 0; step < 1000; ++step) {
      const double typical = step < 300 ? 0.5 : step < 600 ? 5 : 0.05;
      Tensors list = gradients(typical);
      const bool spike = step % 37 == 5;
      if (spike && step % 2) list[0].mul_(50);
      if (spike && step % 2 == 0)
        for (const torch::Tensor& one : list) one.mul_(50);
      const double before = norm_of(list);
      apply_in_buckets(limits, list, 1);
      limits.commit();
      const double after = norm_of(list);
      ASSERT_LE(after, 1 + 1e-6) << step;
      ASSERT_LE(after, before * (1 + 1e-6));
      const bool settled = step % 300 > 60;
      // Where the clip is above the typical norm ordinary gradients pass; where it is below, all of it is used.
      if (!spike && settled && typical < 1) ++ordinary, left_alone += after > 0.99 * before;
      if (!spike && settled && typical > 1) {
        ASSERT_GT(after, 0.75) << step;
      }
    }
    EXPECT_GT(left_alone, 0.9 * ordinary);
  }
}

TEST(GradientLimits, AStepThatIsSkippedIsForgotten) {
  torch::manual_seed(1);
  GradientLimits one(kSizes.size(), 1, torch::kCPU), other(kSizes.size(), 1, torch::kCPU);
  for (int step = 0; step < 5; ++step) {
    const Tensors list = gradients(0.5);
    Tensors copy;
    for (const torch::Tensor& tensor : list) copy.push_back(tensor.clone());
    if (step == 3) {
      Tensors broken = gradients(0.5);
      broken[1][7] = std::numeric_limits<float>::infinity();
      apply_in_buckets(other, broken);
      EXPECT_FALSE(std::isfinite(norm_of(broken)));  // all workers must see it
    }
    apply_in_buckets(one, list);
    apply_in_buckets(other, copy);
    one.commit();
    other.commit();
    EXPECT_TRUE(torch::equal(one.levels(), other.levels()));
  }
}

TEST(GradientLimits, TheLossScaleIsNoPartOfTheNorm) {
  torch::manual_seed(1);
  GradientLimits one(kSizes.size(), 1, torch::kCPU), scaled(kSizes.size(), 1, torch::kCPU);
  for (int step = 0; step < 4; ++step) {
    const Tensors list = gradients(3);
    Tensors copy;
    for (const torch::Tensor& tensor : list) copy.push_back(tensor * 1024);
    apply_in_buckets(one, list);
    apply_in_buckets(scaled, copy, 1024);
    one.commit();
    scaled.commit();
    for (size_t i = 0; i < list.size(); ++i) EXPECT_TRUE(torch::allclose(list[i] * 1024, copy[i]));
  }
}

TEST(GradientLimits, AParameterThatWakesUpIsNotHeldAtZero) {
  torch::manual_seed(1);
  GradientLimits limits(kSizes.size(), 1, torch::kCPU);
  for (int step = 0; step < 60; ++step) {
    const Tensors list = gradients(0.3);
    if (step < 10 || (step > 20 && step < 40)) list[3].zero_();
    const double before = list[3].norm().item<double>();
    apply_in_buckets(limits, list);
    limits.commit();
    EXPECT_GE(list[3].norm().item<double>(), 0.99 * before) << step;
  }
}

}  // namespace
}  // namespace gradwire::train
