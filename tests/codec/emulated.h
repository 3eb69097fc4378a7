// SPDX-License-Identifier: Apache-2.0
// The runner for CUDA and all kernels on an emulated GPU (device/emulated/), beside the reference loop of the CPU: both
// must give the same messages, residuals and results.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "codec/test_devices.h"
#include "device/emulated/emulated_gpu.h"

namespace gradwire::test {

struct Emulated : testing::Test {
  const TestDevice cpu{Device{.simd = "scalar"}}, gpu{Device{.kind = Device::Kind::cuda}};
};

enum class Data { laplace, ties, zeros, tiny, huge, broken, kCount };

inline std::vector<float> values(Data data, uint64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::exponential_distribution<float> exponential;
  std::vector<float> x(count);
  for (float& v : x) {
    v = exponential(random) * (random() % 2 ? 1.0f : -1.0f);
    if (data == Data::ties) v = std::nearbyint(v);
    if (data == Data::zeros) v = random() % 200 ? std::copysign(0.0f, v) : v;
    if (data == Data::tiny) v *= 0x1p-140f;
    if (data == Data::huge) v = std::copysign(std::fmin(std::fabs(v) * 0x1p126f, bits_float(kInfBits - 1)), v);
  }
  if (data == Data::broken)
    for (uint64_t at = 7; at < count; at += 60000) x[at] = at % 2 ? NAN : -INFINITY;
  return x;
}

inline Plan plan_of(const std::string& spec, DType dtype, const std::vector<uint64_t>& counts) {
  std::vector<TensorSpec> tensors;
  for (const uint64_t count : counts)
    tensors.push_back({"t" + std::to_string(tensors.size()), count, dtype, Codec::parse(spec)});
  return Plan(tensors);
}

inline std::vector<Raw> tensors_of(const Plan& plan, Data data, uint64_t seed, DType dtype) {
  std::vector<Raw> all;
  for (const TensorSpec& t : plan.tensors()) all.push_back(raw_of(values(data, t.count, ++seed), dtype));
  return all;
}

// One message with feedback or without, its results set and added; all on both devices.
inline void compare(const TestDevice& cpu, const TestDevice& gpu, const Plan& plan, Data data,
                    const TestFeedback* feedback, const std::string& what) {
  const DType dtype = plan.tensors()[0].dtype;
  const std::vector<Raw> in = tensors_of(plan, data, 100, dtype);
  std::vector<Raw> after, after_gpu;
  const uint64_t runs = emulated::runs();
  const Raw message = cpu.encode(plan, in, {.seed = 3}, feedback, &after);
  ASSERT_EQ(gpu.encode(plan, in, {.seed = 3}, feedback, &after_gpu), message) << what;
  ASSERT_EQ(after_gpu, after) << what << ": residuals";
  ASSERT_EQ(gpu.decode(plan, message), cpu.decode(plan, message)) << what << ": set";
  if (dtype == DType::f32) {
    const std::vector<Raw> start = tensors_of(plan, Data::zeros, 500, dtype);
    ASSERT_EQ(gpu.decode(plan, message, Write::add, &start), cpu.decode(plan, message, Write::add, &start))
        << what << ": add";
  }
  ASSERT_GT(emulated::runs(), runs + 5);
}

inline TestFeedback feedback_of(const Plan& plan, DType dtype) {
  TestFeedback feedback{{}, dtype, dtype == DType::f32 ? 1.0f : 1024.0f};
  for (const TensorSpec& t : plan.tensors())
    feedback.before.push_back(raw_of(values(Data::laplace, t.count, 900), dtype));
  return feedback;
}

}  // namespace gradwire::test
