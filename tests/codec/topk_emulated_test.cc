// SPDX-License-Identifier: Apache-2.0
// topk's kernels on an emulated GPU (device/emulated/): the runner for CUDA, the kernels at both ends of a message and
// all forms of topk are compiled as plain C++ and must give the messages, residuals, results and refusals of the CPU.
// The forms that have run on a GPU, exact values with raw indices, show that the emulation is right.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <stdexcept>

#include "codec/test_devices.h"
#include "device/cuda_job.h"
#include "device/emulated/cuda_runtime.h"
#include "message/message_builder.h"

namespace gradwire {
// No other codec has kernels here.
void cuda_encode(const CudaJob&, cudaStream_t) { throw std::logic_error("only topk is emulated"); }
void cuda_decode(const CudaJob&, cudaStream_t) { throw std::logic_error("only topk is emulated"); }
}  // namespace gradwire

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

// --- against the CPU ---------------------------------------------------------------------------------------------

struct Emulated : testing::Test {
  const TestDevice cpu{Device{.simd = "scalar"}}, gpu{Device{.kind = Device::Kind::cuda}};
};

enum class Data { laplace, ties, zeros, tiny, huge, broken, kCount };

std::vector<float> values(Data data, uint64_t count, uint64_t seed) {
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

Plan plan_of(const std::string& spec, DType dtype, const std::vector<uint64_t>& counts) {
  std::vector<TensorSpec> tensors;
  for (const uint64_t count : counts)
    tensors.push_back({"t" + std::to_string(tensors.size()), count, dtype, Codec::parse(spec)});
  return Plan(tensors);
}

std::vector<Raw> tensors_of(const Plan& plan, Data data, uint64_t seed, DType dtype) {
  std::vector<Raw> all;
  for (const TensorSpec& t : plan.tensors()) all.push_back(raw_of(values(data, t.count, ++seed), dtype));
  return all;
}

// One message with feedback or without, its results set and added; all on both devices.
void compare(const TestDevice& cpu, const TestDevice& gpu, const Plan& plan, Data data, const TestFeedback* feedback,
             const std::string& what) {
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

TestFeedback feedback_of(const Plan& plan, DType dtype) {
  TestFeedback feedback{{}, dtype, dtype == DType::f32 ? 1.0f : 1024.0f};
  for (const TensorSpec& t : plan.tensors())
    feedback.before.push_back(raw_of(values(Data::laplace, t.count, 900), dtype));
  return feedback;
}

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
