// SPDX-License-Identifier: Apache-2.0
// What only a GPU does: errors that appear at wait(), outputs that become NaN, addresses that are not aligned, more tensors than one
// launch takes addresses for. That its frames are the CPU's is the business of conformance_test. On a machine without a GPU
// these tests say that the CUDA code was compiled and not run.
#include <gtest/gtest.h>

#include <cmath>

#include "bed.h"
#include "gradwire/error.h"
#include "gradwire/learn.h"
#include "gradwire/message.h"

namespace gradwire::test {
namespace {

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_devices() == 0) GTEST_SKIP() << "no GPU here: the CUDA code was compiled, not run";
  }
  const Bed cpu{Device{}};
  const Bed gpu{Device{.kind = Device::Kind::cuda}};
};

std::vector<float> ramp(uint64_t count) {
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i) values[i] = std::sin(static_cast<float>(i) * 0.7f) * (1 + static_cast<float>(i % 13));
  return values;
}

std::string field_of_failure(const Bed& bed, const Plan& plan, const Raw& message, const Stamp* expected = nullptr) {
  try {
    bed.decode(plan, message, Write::set, nullptr, expected);
  } catch (const Error& e) {
    return e.kind() == ErrorKind::frame ? e.field() : "another kind of error";
  }
  return "accepted";
}

TEST_F(Cuda, ADamagedBodyIsAnErrorAtWait) {
  for (const char* spec : {"fp32", "fp16", "qsgd:bits=4", "qsgd:bits=5", "qsgd:bits=4,bucket=128", "terngrad", "onebit", "topk", "topk:mode=paper"}) {
    const Plan plan({{"w", 70001, DType::f32, Codec::parse(spec)}});
    const Raw message = cpu.encode(plan, {raw_of(ramp(70001))}, {.seed = 1});
    for (size_t at : {message.size() - 1, message.size() / 2, message.size() - 4000}) {
      Raw damaged = message;
      damaged[at] ^= std::byte{0x10};
      EXPECT_NE(field_of_failure(gpu, plan, damaged), "accepted") << spec << " byte " << at;
    }
    EXPECT_EQ(field_of_failure(gpu, plan, message), "accepted") << spec;
  }
}

TEST_F(Cuda, ADamagedMessageLeavesNaNAndNothingElse) {
  const Plan plan({{"w", 5000, DType::f32, Codec::parse("qsgd:bits=4")}});
  Raw message = cpu.encode(plan, {raw_of(ramp(5000))}, {.seed = 1});
  message.back() ^= std::byte{1};
  const auto memory = memory_of(gpu.device());
  const auto runner = make_runner(plan, gpu.device());
  void *bytes = memory->allocate(message.size()), *out = memory->allocate(5000 * 4);
  memory->from_host(bytes, message.data(), message.size());
  void* outs[] = {out};
  runner->decode({static_cast<const std::byte*>(bytes), message.size()}, outs);
  EXPECT_THROW(runner->wait(), Error);
  std::vector<float> values(5000);
  memory->to_host(values.data(), out, values.size() * 4);
  for (float value : values) ASSERT_TRUE(std::isnan(value));
  EXPECT_NO_THROW(runner->wait()) << "an error is told once";
  memory->release(bytes);
  memory->release(out);
}

TEST_F(Cuda, TheHeadAndTheStampAreChecked) {
  const Plan plan({{"w", 5000, DType::f32, Codec::parse("qsgd:bits=4")}}), other({{"v", 5000, DType::f32, Codec::parse("qsgd:bits=4")}});
  const Stamp stamp{.seed = 1, .step = 4, .stage = 1, .rank = 2, .world = 3};
  const Raw message = cpu.encode(plan, {raw_of(ramp(5000))}, stamp);
  EXPECT_EQ(field_of_failure(gpu, plan, message, &stamp), "accepted");
  EXPECT_EQ(field_of_failure(gpu, other, message), "head");
  Stamp wrong = stamp;
  wrong.step = 5;
  EXPECT_EQ(field_of_failure(gpu, plan, message, &wrong), "stamp");
  Raw damaged = message;
  damaged[16] ^= std::byte{1};  // the step, without its check
  EXPECT_EQ(field_of_failure(gpu, plan, damaged), "head");
}

TEST_F(Cuda, TensorsNeedNoAlignmentBeyondTheirElements) {
  const Plan plan({{"w", 40000, DType::f32, Codec::parse("qsgd:bits=4")}});
  const std::vector<float> values = ramp(40001);
  const auto memory = memory_of(gpu.device());
  const auto runner = make_runner(plan, gpu.device());
  auto* in = static_cast<float*>(memory->allocate(40001 * 4));
  auto* out = static_cast<float*>(memory->allocate(40001 * 4));
  auto* bytes = static_cast<std::byte*>(memory->allocate(plan.message_bytes()));
  memory->from_host(in, values.data(), values.size() * 4);
  const void* ins[] = {in + 1};
  void* outs[] = {out + 1};
  runner->encode(ins, {.seed = 1}, {bytes, plan.message_bytes()});
  runner->decode({bytes, plan.message_bytes()}, outs);
  runner->wait();
  Raw message(plan.message_bytes());
  memory->to_host(message.data(), bytes, message.size());
  const std::vector<float> shifted(values.begin() + 1, values.end());
  EXPECT_EQ(message, cpu.encode(plan, {raw_of(shifted)}, {.seed = 1}));
  std::vector<float> decoded(40000);
  memory->to_host(decoded.data(), out + 1, decoded.size() * 4);
  EXPECT_EQ(decoded, values_of(cpu.decode(plan, message)[0]));
  for (void* p : {static_cast<void*>(in), static_cast<void*>(out), static_cast<void*>(bytes)}) memory->release(p);
}

TEST_F(Cuda, MoreTensorsThanOneLaunchTakes) {
  std::vector<TensorSpec> list;
  std::vector<Raw> in;
  for (int i = 0; i < 1500; ++i) {
    list.push_back({"t" + std::to_string(i), static_cast<uint64_t>(i * 37 % 3000), DType::f32, Codec::parse(i % 3 ? "qsgd:bits=4" : "fp16")});
    in.push_back(raw_of(ramp(list.back().count)));
  }
  const Plan plan(list);
  const Raw message = cpu.encode(plan, in, {.seed = 2});
  EXPECT_EQ(gpu.encode(plan, in, {.seed = 2}), message);
  EXPECT_EQ(gpu.decode(plan, message), cpu.decode(plan, message));
}

// What learners look at: blocks with feedback added, and side values, are those of the CPU; so is what is learned from them.
TEST_F(Cuda, LearnersSeeWhatTheySeeOnTheCpu) {
  const uint64_t count = 100'001;
  const std::vector<float> x = ramp(count);
  std::vector<uint16_t> half(count);
  for (uint64_t i = 0; i < count; ++i) half[i] = f32_to_bf16(x[i]);
  for (const char* spec : {"optquant:bits=3", "casq:bits=2", "casq:bits=2,mode=paper", "rangefloat", "fft", "dqsgd"}) {
    const auto memory = memory_of(gpu.device());
    void* device = memory->allocate(count * 4);
    memory->from_host(device, x.data(), count * 4);
    EXPECT_EQ(fit(Codec::parse(spec), device, count, DType::f32, gpu.device()), fit(Codec::parse(spec), x.data(), count, DType::f32)) << spec;
    memory->from_host(device, half.data(), count * 2);
    EXPECT_EQ(fit(Codec::parse(spec), device, count, DType::bf16, gpu.device()), fit(Codec::parse(spec), half.data(), count, DType::bf16)) << spec;
    memory->release(device);
  }
  // With feedback, and more picks than one launch takes.
  const Plan plan({{"a", count, DType::f32, Codec::parse("qsgd")}, {"b", 0, DType::f32, Codec()}, {"c", 33, DType::f32, Codec::parse("qsgd:bucket=64")}});
  const std::vector<float> tail = ramp(33), owed = ramp(count + 5), owed_tail = ramp(40);
  const auto look = [&](const Device& device) {
    const auto memory = memory_of(device);
    std::vector<void*> held;
    const auto put = [&](const std::vector<float>& values, uint64_t n) {
      held.push_back(memory->allocate(n * 4 + 4));
      memory->from_host(held.back(), values.data(), n * 4);
      return held.back();
    };
    const std::vector<const void*> in = {put(x, count), nullptr, put(tail, 33)}, before = {put(owed, count), nullptr, put(owed_tail, 33)};
    const std::vector<void*> after = {put(owed, count), nullptr, put(owed_tail, 33)};
    const Residuals residuals{before, after, DType::f32, 2.0f};
    const auto runner = make_runner(plan, device);
    auto* message = static_cast<std::byte*>(memory->allocate(plan.message_bytes()));
    runner->encode(in, {}, {message, plan.message_bytes()}, &residuals);
    std::vector<Pick> picks;
    for (uint64_t block = 0; block < 98; ++block) picks.push_back({0, block});
    for (int i = 0; i < 40; ++i) picks.push_back({2, 0});
    const std::span<const float> sample = runner->sample(in, &residuals, picks);
    const uint32_t which[] = {2, 0};
    const std::span<const uint32_t> sides = runner->sides({message, plan.message_bytes()}, which);
    runner->wait();
    std::pair<std::vector<float>, std::vector<uint32_t>> seen({sample.begin(), sample.end()}, {sides.begin(), sides.end()});
    memory->release(message);
    for (void* p : held) memory->release(p);
    return seen;
  };
  const auto here = look(cpu.device()), there = look(gpu.device());
  EXPECT_EQ(here.first.size(), 138u * 1024);
  EXPECT_EQ(here.second.size(), 1u + 98);
  EXPECT_EQ(here, there);
}

}  // namespace
}  // namespace gradwire::test
