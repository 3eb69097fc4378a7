// SPDX-License-Identifier: Apache-2.0
// What only a GPU does: errors that appear at wait(), outputs that become NaN, addresses that are not aligned, more tensors than one
// launch takes addresses for. That its frames are the CPU's is the business of conformance_test. On a machine without a GPU
// these tests say that the CUDA code was compiled and not run.
#include <gtest/gtest.h>

#include <cmath>

#include "bed.h"
#include "gradwire/error.h"
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

}  // namespace
}  // namespace gradwire::test
