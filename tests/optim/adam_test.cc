// SPDX-License-Identifier: Apache-2.0
// SGD, Adam and AdamW against their formulas in double precision, and their bits: one operation after another in a
// scalar loop, with any number of threads, on a GPU, and in the very first call of two threads that make it at once.
#include "optim/adam.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <ostream>
#include <thread>
#include <vector>

#include "device/memory.h"
#include "optim/normal_values.h"

namespace gradwire {
namespace {

struct RuleCase {
  const char* name;
  bool adam;
  SgdOptions sgd;
  AdamOptions adam_options;
};
void PrintTo(const RuleCase& rule, std::ostream* out) { *out << rule.name; }

const RuleCase kRules[] = {
    {"sgd", false, {}, {}},
    {"momentum", false, {.momentum = 0.9, .weight_decay = 0.01}, {}},
    {"adam", true, {}, {}},
    {"adam_with_decay", true, {}, {.weight_decay = 0.1}},
    {"adamw", true, {}, {.weight_decay = 0.1, .decoupled = true}},
    {"other_numbers", true, {}, {.beta1 = 0.5, .beta2 = 0.97, .epsilon = 1e-3, .weight_decay = 1}}};
constexpr double kRate = 0.003, kFactor = 0.75;

// The arrays of one parameter, on the host.
struct HostArrays {
  explicit HostArrays(uint64_t count, uint64_t seed)
      : first(count), second(count), weights(test::normal_values(count, seed)) {}
  OptimizerSpan span(const std::vector<float>& gradient) {
    return {.gradient = gradient.data(),
            .first = first.data(),
            .second = second.data(),
            .shared = nullptr,
            .out = weights.data(),
            .count = weights.size()};
  }
  bool operator==(const HostArrays&) const = default;
  std::vector<float> first, second, weights;
};

void step(const RuleCase& rule, const Elementwise& device, std::span<const OptimizerSpan> spans, uint64_t k) {
  rule.adam ? adam_step(device, spans, rule.adam_options, k, kRate, kFactor)
            : sgd_step(device, spans, rule.sgd, kRate, kFactor);
}

std::vector<float> gradient_of(uint64_t count, uint64_t k) {
  return test::normal_values(count, 1000 + k, std::pow(10.0, static_cast<double>(k % 5) - 3));
}

class OptimizerRule : public testing::TestWithParam<RuleCase> {};
INSTANTIATE_TEST_SUITE_P(Adam, OptimizerRule, testing::ValuesIn(kRules),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(OptimizerRule, FollowsItsFormula) {
  const auto& [name, adam, sgd, o] = GetParam();
  constexpr uint64_t kCount = 1000;
  HostArrays ours(kCount, 1);
  std::vector<double> w(ours.weights.begin(), ours.weights.end()), m(kCount), v(kCount), moved(kCount);
  const Elementwise device{Device{}};
  for (uint64_t k = 1; k <= 60; ++k) {
    const std::vector<float> gradient = gradient_of(kCount, k);
    const OptimizerSpan spans[] = {ours.span(gradient)};
    step(GetParam(), device, spans, k);
    for (uint64_t i = 0; i < kCount; ++i) {
      double g = kFactor * gradient[i], change;
      if (adam) {
        if (o.decoupled)
          w[i] -= kRate * o.weight_decay * w[i];
        else
          g += o.weight_decay * w[i];
        m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
        v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
        const double corrected1 = m[i] / (1 - std::pow(o.beta1, k)), corrected2 = v[i] / (1 - std::pow(o.beta2, k));
        change = kRate * corrected1 / (std::sqrt(corrected2) + o.epsilon);
      } else {
        g += sgd.weight_decay * w[i];
        m[i] = sgd.momentum * m[i] + g;
        change = kRate * m[i];
      }
      w[i] -= change;
      moved[i] += std::abs(change);
      // Every step rounds the weight twice (AdamW's factor is rounded too) and the change several times.
      const double allowed = 2e-7 * static_cast<double>(k) * (std::abs(w[i]) + moved[i]) + 3e-6 * moved[i];
      ASSERT_NEAR(ours.weights[i], w[i], allowed) << "step " << k << ", element " << i;
    }
  }
}

// A value that the compiler must round and cannot combine with its neighbour.
float rounded(float value) {
  volatile float kept = value;
  return kept;
}

TEST_P(OptimizerRule, RoundsEveryOperationByItself) {
  const RuleCase& rule = GetParam();
  constexpr uint64_t kCount = 4099;  // whole vectors and a rest
  HostArrays ours(kCount, 2), plain(kCount, 2);
  const Elementwise device{Device{}};
  for (uint64_t k = 1; k <= 5; ++k) {
    const std::vector<float> gradient = gradient_of(kCount, k);
    const OptimizerSpan spans[] = {ours.span(gradient)};
    step(rule, device, spans, k);
    const AdamRule n = adam_rule(rule.adam_options, k, kRate, kFactor);
    const auto sum = [](float a, float x, float b, float y) { return rounded(rounded(a * x) + rounded(b * y)); };
    for (uint64_t i = 0; i < kCount; ++i) {
      float &w = plain.weights[i], &m = plain.first[i], &v = plain.second[i];
      if (rule.adam) {
        w = rounded(w * n.keep);
        const float g = sum(n.factor, gradient[i], n.weight_decay, w);
        m = sum(n.beta1, m, n.fresh1, g);
        v = sum(n.beta2, v, n.fresh2, rounded(g * g));
        const float below = rounded(rounded(rounded(std::sqrt(v)) / n.root) + n.epsilon);
        w = rounded(w - rounded(n.rate * rounded(m / below)));
      } else {
        float g = sum(static_cast<float>(kFactor), gradient[i], static_cast<float>(rule.sgd.weight_decay), w);
        if (rule.sgd.momentum > 0) g = m = rounded(rounded(static_cast<float>(rule.sgd.momentum) * m) + g);
        w = rounded(w - rounded(static_cast<float>(kRate) * g));
      }
    }
    ASSERT_EQ(ours, plain) << "step " << k;
  }
}

TEST_P(OptimizerRule, ThreadsChangeNoBit) {
  constexpr uint64_t kCount = 200'003;  // several chunks, the last one short
  const std::vector<float> gradient = gradient_of(kCount, 3);
  HostArrays one(kCount, 3), three(kCount, 3);
  const OptimizerSpan alone[] = {one.span(gradient)}, together[] = {three.span(gradient)};
  step(GetParam(), Elementwise{Device{}}, alone, 1);
  step(GetParam(), Elementwise{Device{.threads = 3}}, together, 1);
  EXPECT_EQ(one, three);
}

// Workers are threads that take their first step at the same moment. 200 times two fresh threads do.
TEST_P(OptimizerRule, TheFirstStepOfTwoThreadsAtOnceGivesTheSameBits) {
  constexpr uint64_t kCount = 500;
  const std::vector<float> gradient = gradient_of(kCount, 4);
  for (int round = 0; round < 200; ++round) {
    HostArrays arrays[] = {HostArrays(kCount, 5), HostArrays(kCount, 5)};
    std::atomic<int> ready{0};
    const auto work = [&](HostArrays& mine) {
      const Elementwise device{Device{}};
      const OptimizerSpan spans[] = {mine.span(gradient)};
      ++ready;
      while (ready < 2) std::this_thread::yield();
      step(GetParam(), device, spans, 1);
    };
    std::thread first([&] { work(arrays[0]); }), second([&] { work(arrays[1]); });
    first.join();
    second.join();
    ASSERT_EQ(arrays[0], arrays[1]) << "round " << round;
  }
}

TEST_P(OptimizerRule, AGpuGivesTheBitsOfTheProcessor) {
  if (cuda_devices() == 0) GTEST_SKIP() << "compiled, not run: no GPU here";
  const Device gpu{.kind = Device::Kind::cuda};
  const std::shared_ptr<Memory> memory = memory_of(gpu);
  const Elementwise here{Device{}}, there(gpu);
  for (const uint64_t count : {uint64_t{1}, uint64_t{1000}, uint64_t{1'000'003}}) {
    HostArrays arrays(count, 6);
    const uint64_t bytes = count * sizeof(float);
    const auto make = [&] { return static_cast<float*>(memory->allocate(bytes)); };
    float* const gradient = make();
    const OptimizerSpan span{gradient, make(), make(), nullptr, make(), count};
    memory->zero(span.first, bytes);
    memory->zero(span.second, bytes);
    memory->from_host(span.out, arrays.weights.data(), bytes);
    for (uint64_t k = 1; k <= 5; ++k) {
      const std::vector<float> values = gradient_of(count, k);
      const OptimizerSpan on_host[] = {arrays.span(values)}, on_device[] = {span};
      memory->from_host(gradient, values.data(), bytes);
      step(GetParam(), here, on_host, k);
      step(GetParam(), there, on_device, k);
      std::vector<float> back(count);
      memory->to_host(back.data(), span.out, bytes);
      ASSERT_EQ(back, arrays.weights) << count << " elements, step " << k;
    }
    for (float* const one : {gradient, span.first, span.second, span.out}) memory->release(one);
  }
}

}  // namespace
}  // namespace gradwire
