// SPDX-License-Identifier: Apache-2.0
// All codecs but topk on an emulated GPU (emulated.h). Where there is no GPU, this is what shows that a change of a
// kernel keeps the bytes.
#include "codec/emulated.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "device/emulated/cuda_runtime.h"
#include "message/message_builder.h"

namespace gradwire::test {
namespace {

// --- the emulation itself ----------------------------------------------------------------------------------------

std::string failure_of(const std::function<void()>& kernel) {
  try {
    emulated::run(1, 64, kernel);
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return "";
}

TEST(EmulatedGpu, ThreadsThatNeverMeetAreFound) {
  EXPECT_NE(failure_of([] {
              if (threadIdx.x != 5) __syncthreads();
            }).find("which is done"),
            std::string::npos);
  EXPECT_NE(failure_of([] {
              if (threadIdx.x < 32) __ballot_sync(~0u, 1);
              if (threadIdx.x % 2)
                __syncthreads();
              else
                __ballot_sync(~0u, 1);
            }).find("which waits at"),
            std::string::npos);
  EXPECT_EQ(failure_of([] {
              if (threadIdx.x < 32) __ballot_sync(~0u, 1);  // the whole of a warp, or none of it
              __syncthreads();
            }),
            "");
}

TEST(EmulatedGpu, AMissingBarrierShows) {
  static uint32_t shared[64];
  const auto wrong = [](bool barrier) {
    int count = 0;
    for (int round = 0; round < 10; ++round)
      emulated::run(1, 64, [&] {
        shared[threadIdx.x] = 0;
        __syncthreads();
        shared[threadIdx.x] = threadIdx.x;
        if (barrier) __syncthreads();
        count += shared[63 - threadIdx.x] != 63 - threadIdx.x;
      });
    return count;
  };
  EXPECT_EQ(wrong(true), 0);
  EXPECT_GT(wrong(false), 100);
}

TEST(EmulatedGpu, OperationsOfAWarpAndABlock) {
  emulated::run(3, 64, [] {
    const unsigned lane = threadIdx.x % 32;
    EXPECT_EQ(__ballot_sync(~0u, lane % 3 == 0), 0x49249249u);
    EXPECT_EQ(__reduce_add_sync(~0u, lane), 496u);
    EXPECT_EQ(__reduce_max_sync(~0u, lane ^ 5), 31u);
    EXPECT_EQ(__shfl_sync(~0u, lane * 2.5f, 7), 17.5f);
    EXPECT_EQ(__shfl_up_sync(~0u, lane, 4), lane < 4 ? lane : lane - 4);
    EXPECT_EQ(__shfl_down_sync(~0u, lane, 1), lane == 31 ? 31 : lane + 1);
    EXPECT_EQ(__shfl_xor_sync(~0u, uint64_t{lane} << 40, 8), uint64_t{lane ^ 8} << 40);
    EXPECT_EQ(__syncthreads_count(threadIdx.x < 40), 40);
  });
}

// --- codecs --------------------------------------------------------------------------------------------------------

std::vector<std::string> specs() {
  std::vector<std::string> all;
  for (const CodecInfo& info : codecs())
    for (const std::string& spec : info.specs)
      if (info.name != "topk") all.push_back(spec);
  return all;
}

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

TEST_F(Emulated, EveryCodec) {
  for (const std::string& spec : specs()) {
    const Plan plan = plan_of(spec, DType::f32, {1, 1025, 66000});
    const TestFeedback feedback = feedback_of(plan, DType::f32);
    compare(cpu, gpu, plan, Data::laplace, &feedback, spec);
    if (HasFatalFailure()) return;
  }
}

// Every codec, each with another kind of values, another type of elements and of residuals; vectors of four cannot be
// loaded from every address.
TEST_F(Emulated, EveryCodecWithOtherValuesTypesAndAddresses) {
  const TestDevice shifted{Device{.kind = Device::Kind::cuda}, 4};
  unsigned turn = 0;
  for (const std::string& spec : specs())
    for (unsigned kind = 0; kind < static_cast<unsigned>(Data::kCount); ++kind, ++turn) {
      const DType dtype = kTypes[turn % 3];
      const Plan plan = plan_of(spec, dtype, {33, 5000, 1024, 31});
      const TestFeedback feedback = feedback_of(plan, turn / 3 % 2 ? DType::f32 : DType::bf16);
      compare(cpu, turn % 5 < 2 ? shifted : gpu, plan, static_cast<Data>(kind), turn % 4 ? &feedback : nullptr,
              spec + " of data " + std::to_string(kind) + ", turn " + std::to_string(turn));
      if (HasFatalFailure()) return;
    }
}

// All of that, at every size around which something changes.
TEST_F(Emulated, LongEveryCodecAtEverySize) {
  const TestDevice shifted{Device{.kind = Device::Kind::cuda}, 8};
  unsigned turn = 0;
  for (const std::string& spec : specs())
    for (unsigned kind = 0; kind < static_cast<unsigned>(Data::kCount); ++kind)
      for (const DType dtype : kTypes) {
        ++turn;
        const Plan plan =
            plan_of(spec, dtype, {1, 31, 32, 33, 1023, 1024, 1025, 4096, 100000, 32767, 32768, 32769, 0, 65536, 70001});
        const TestFeedback feedback = feedback_of(plan, turn % 2 ? DType::f32 : DType::bf16);
        compare(cpu, (turn + kind) % 3 ? gpu : shifted, plan, static_cast<Data>(kind),
                turn / 3 % 4 ? &feedback : nullptr,
                spec + " of data " + std::to_string(kind) + ", type " + std::to_string(static_cast<int>(dtype)));
        if (HasFatalFailure()) return;
      }
}

// Tensors of all sizes in one message, with several codecs: how warps share full blocks and tails (share_out).
TEST_F(Emulated, ManyTensorsOfSeveralCodecs) {
  std::mt19937_64 random(3);
  for (const int most : {100, 3000, 40000}) {
    std::vector<TensorSpec> list;
    for (int i = 0; i < 150; ++i) {
      const uint64_t count = random() % 4 ? random() % most : random() % most / 1024 * 1024;
      const char* spec = (const char*[]){"qsgd:bits=4", "optquant:bits=3", "fp16", "qsgd:bits=2,bucket=8192"}[i % 4];
      list.push_back({"t" + std::to_string(i), count, DType::f32, Codec::parse(spec)});
    }
    const Plan plan(list);
    const TestFeedback feedback = feedback_of(plan, DType::f32);
    compare(cpu, gpu, plan, Data::laplace, &feedback, "at most " + std::to_string(most));
    compare(cpu, gpu, plan, Data::laplace, nullptr, "at most " + std::to_string(most) + ", no feedback");
  }
}

// --- malformed messages ------------------------------------------------------------------------------------------

// Whatever is altered, both devices take it or refuse it; for the same reason, unless there may be several.
TEST_F(Emulated, AlteredMessagesGetTheVerdictOfTheCpu) {
  std::mt19937_64 random(11);
  int taken = 0, refused = 0;
  for (const std::string& spec : specs())
    for (const uint64_t count : {50, 2500, 33000}) {
      const Plan plan = plan_of(spec, DType::f32, {count});
      MessageBuilder message(plan.tensors());
      const Data data = random() % 3 ? Data::laplace : Data::broken;
      message.bytes = cpu.encode(plan, tensors_of(plan, data, random(), DType::f32), {.seed = 1});
      const uint64_t words = (message.bytes.size() - message.head_bytes()) / 4;
      for (int round = 0; round < 4; ++round) {
        MessageBuilder altered = message;
        const uint64_t flips = 1 + random() % 3;
        for (uint64_t i = 0; i < flips; ++i) {
          const uint64_t word = random() % 2 ? random() % words : words - 1 - random() % std::min<uint64_t>(words, 6);
          altered.set_word(word,
                           random() % 4 ? altered.word(word) ^ 1u << random() % 32 : static_cast<uint32_t>(random()));
        }
        reseal(altered.bytes);
        const std::string expected = refused_field([&] { cpu.decode(plan, altered.bytes); });
        const std::string found = refused_field([&] { gpu.decode(plan, altered.bytes); });
        ASSERT_EQ(found.empty(), expected.empty()) << spec << ", " << count;
        if (flips == 1) {
          ASSERT_EQ(found, expected) << spec << ", " << count;
        }
        if (expected.empty()) {
          ++taken;
          ASSERT_EQ(gpu.decode(plan, altered.bytes), cpu.decode(plan, altered.bytes)) << spec << ", " << count;
        } else {
          ++refused;
        }
      }
    }
  EXPECT_GT(taken, 100);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace gradwire::test
