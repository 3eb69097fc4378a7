// SPDX-License-Identifier: Apache-2.0
// topk on an emulated GPU (emulated.h): all its forms give the messages, residuals, results and refusals of the CPU.
// The forms that have run on a GPU, exact values with raw indices, show that the emulation is right.
#include <gtest/gtest.h>

#include <random>

#include "codec/emulated.h"
#include "message/message_builder.h"

namespace gradwire::test {
namespace {

std::vector<std::string> packed_specs(const char* ratio) {
  std::vector<std::string> specs;
  for (const char* index : {"raw", "coded", "bitmap"})
    for (const char* bits : {"1", "2", "3", "4", "5", "6", "7", "8", "16", "32"})
      specs.push_back(std::string("topk:ratio=") + ratio + ",bits=" + bits + ",index=" + index);
  std::erase_if(specs, [](const std::string& spec) { return spec.ends_with("bits=32,index=raw"); });  // not packed
  return specs;
}

TEST_F(Emulated, FormsThatAGpuHasRun) {
  for (const char* spec : {"topk:ratio=0.015625", "topk:ratio=0.3", "topk:ratio=1", "topk:ratio=0.01,mode=paper"})
    for (const Data data : {Data::laplace, Data::ties, Data::broken}) {
      const Plan plan = plan_of(spec, DType::f32, {1, 1025, 66000});
      const TestFeedback feedback = feedback_of(plan, DType::f32);
      const std::vector<Raw> in = tensors_of(plan, data, 100, DType::f32);
      std::vector<Raw> after, after_gpu;
      const Raw message = cpu.encode(plan, in, {.seed = 3}, &feedback, &after);
      ASSERT_EQ(gpu.encode(plan, in, {.seed = 3}, &feedback, &after_gpu), message) << spec;
      ASSERT_EQ(after_gpu, after) << spec;
      ASSERT_EQ(gpu.decode(plan, message), cpu.decode(plan, message)) << spec;
    }
}

// Where a clock has the step, stamps have none: the message is that of the clock's step, and only that is accepted.
TEST_F(Emulated, AClockHasTheStep) {
  uint64_t clock = 41;
  const TestDevice clocked{Device{.kind = Device::Kind::cuda, .clock = &clock}};
  const Plan plan = plan_of("topk:ratio=0.1,bits=3", DType::f32, {66000, 1025, 7, 3000, 12});
  const std::vector<Raw> in = tensors_of(plan, Data::laplace, 100, DType::f32);
  for (const uint64_t step : {uint64_t{0}, uint64_t{41}, uint64_t{1} << 40}) {
    clock = step;
    const Stamp real{.seed = 3, .step = step, .stage = 1, .rank = 2, .world = 3};
    Stamp none = real;
    none.step = 7;
    const Raw message = cpu.encode(plan, in, real);
    ASSERT_EQ(clocked.encode(plan, in, none), message);
    ASSERT_EQ(clocked.decode(plan, message, Write::set, nullptr, &none), cpu.decode(plan, message));
    clock = step + 1;
    EXPECT_EQ(refused_field([&] { clocked.decode(plan, message, Write::set, nullptr, &real); }), "stamp");
  }
}

// Every packed form, each with another share, another kind of values, another element type, with feedback or without.
TEST_F(Emulated, PackedForms) {
  const char* ratios[] = {"0.000001", "0.015625", "0.06", "0.3", "1"};
  const DType types[] = {DType::f32, DType::bf16, DType::f16, DType::f32};
#if defined(__SANITIZE_ADDRESS__)
  constexpr unsigned kTurns = 15;  // a switch between stacks takes ten times as long
#else
  constexpr unsigned kTurns = 60;
#endif
  for (unsigned turn = 0; turn < kTurns; ++turn) {
    const std::vector<std::string> specs = packed_specs(ratios[turn % 5]);
    const std::string& spec = specs[turn % specs.size()];
    const Plan plan = plan_of(spec, types[turn % 4], {33, 33793});
    const Data data = static_cast<Data>(turn % 7 % static_cast<unsigned>(Data::kCount));
    const TestFeedback feedback = feedback_of(plan, turn % 8 < 4 ? DType::f32 : DType::bf16);
    compare(cpu, gpu, plan, data, turn % 3 ? &feedback : nullptr,
            spec + " of data " + std::to_string(static_cast<int>(data)));
    if (HasFatalFailure()) return;
  }
}

// Every form with every share and around every size at which something changes.
TEST_F(Emulated, LongPackedFormsOfEverySize) {
  unsigned turn = 0;
  for (const char* ratio : {"0.000001", "0.015625", "0.06", "0.3", "1"})
    for (const std::string& spec : packed_specs(ratio)) {
      const Plan plan = plan_of(spec, DType::f32, {1, 31, 32, 33, 1023, 1024, 1025, 100000, 32767, 32768, 32769});
      const Data data = static_cast<Data>(turn++ % static_cast<unsigned>(Data::kCount));
      const TestFeedback feedback = feedback_of(plan, DType::f32);
      compare(cpu, gpu, plan, data, turn % 2 ? &feedback : nullptr,
              spec + " of data " + std::to_string(static_cast<int>(data)));
      if (HasFatalFailure()) return;
    }
}

// --- malformed messages ------------------------------------------------------------------------------------------

std::string verdict(const TestDevice& device, const Plan& plan, const Raw& message) {
  return refused_field([&] { device.decode(plan, message); });
}

// Whatever is altered in one tile, both devices take it or name the same field.
TEST_F(Emulated, AlteredTilesGetTheVerdictOfTheCpu) {
  std::mt19937_64 random(7);
  int taken = 0, refused = 0;
  for (const char* ratio : {"0.001", "0.1", "0.6"})
    for (const std::string& spec : packed_specs(ratio))
      for (const uint64_t count : {50, 1000, 2500}) {
        const Plan plan = plan_of(spec, DType::f32, {count});
        const bool marked = random() % 3 == 0;
        MessageBuilder message(plan.tensors());
        message.bytes = cpu.encode(plan, tensors_of(plan, marked ? Data::broken : Data::laplace, random(), DType::f32),
                                   {.seed = 1});
        const uint64_t words = (message.bytes.size() - message.head_bytes()) / 4;
        for (int round = 0; round < 8; ++round) {
          MessageBuilder altered = message;
          for (uint64_t flips = 1 + random() % 3; flips > 0; --flips) {
            const uint64_t word = random() % 2 ? random() % words : words - 1 - random() % std::min<uint64_t>(words, 4);
            altered.set_word(word,
                             random() % 8 ? altered.word(word) ^ 1u << random() % 32 : static_cast<uint32_t>(random()));
          }
          reseal(altered.bytes);
          const std::string expected = verdict(cpu, plan, altered.bytes);
          ASSERT_EQ(verdict(gpu, plan, altered.bytes), expected) << spec << ", " << count << " elements";
          if (expected.empty()) {
            ++taken;
            ASSERT_EQ(gpu.decode(plan, altered.bytes), cpu.decode(plan, altered.bytes)) << spec;
          } else {
            ++refused;
          }
        }
      }
  EXPECT_GT(taken, 100);
  EXPECT_GT(refused, 500);
}

}  // namespace
}  // namespace gradwire::test
