// SPDX-License-Identifier: Apache-2.0
// What only a GPU does: errors that appear at wait(), outputs that become NaN, addresses that are not aligned, more
// tensors than one launch takes addresses for; and whole reductions, of ranks that share one GPU with a stream each,
// against those of the CPU. That its frames are the CPU's is the business of conformance_test. On a machine without a
// GPU these tests say that the CUDA code was compiled and not run.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <stdexcept>

#include "codec/test_devices.h"
#include "collective/collective_fixture.h"
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
  const TestDevice cpu{Device{}};
  const TestDevice gpu{Device{.kind = Device::Kind::cuda}};
};

std::vector<float> ramp(uint64_t count) {
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i)
    values[i] = std::sin(static_cast<float>(i) * 0.7f) * (1 + static_cast<float>(i % 13));
  return values;
}

std::string field_of_failure(const TestDevice& device, const Plan& plan, const Raw& message,
                             const Stamp* expected = nullptr) {
  try {
    device.decode(plan, message, Write::set, nullptr, expected);
  } catch (const Error& e) {
    return e.kind() == ErrorKind::frame ? e.field() : "another kind of error";
  }
  return "accepted";
}

TEST_F(Cuda, ADamagedBodyIsAnErrorAtWait) {
  for (const char* spec : {"fp32", "fp16", "qsgd:bits=4", "qsgd:bits=5", "qsgd:bits=4,bucket=128", "terngrad", "onebit",
                           "topk", "topk:mode=paper", "topk:bits=2", "topk:bits=16,index=bitmap"}) {
    const Plan plan({{"w", 70001, DType::f32, Codec::parse(spec)}});
    const Raw message = cpu.encode(plan, {raw_of(ramp(70001))}, {.seed = 1});
    for (size_t at : {message.size() - 1, message.size() / 2, message.size() - message.size() / 8}) {
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
  const Plan plan({{"w", 5000, DType::f32, Codec::parse("qsgd:bits=4")}}),
      other({{"v", 5000, DType::f32, Codec::parse("qsgd:bits=4")}});
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
    list.push_back({"t" + std::to_string(i), static_cast<uint64_t>(i * 37 % 3000), DType::f32,
                    Codec::parse(i % 3 ? "qsgd:bits=4" : "fp16")});
    in.push_back(raw_of(ramp(list.back().count)));
  }
  const Plan plan(list);
  const Raw message = cpu.encode(plan, in, {.seed = 2});
  EXPECT_EQ(gpu.encode(plan, in, {.seed = 2}), message);
  EXPECT_EQ(gpu.decode(plan, message), cpu.decode(plan, message));
}

// What learners look at: blocks with feedback added, and side values, are those of the CPU; so is what is learned from
// them.
TEST_F(Cuda, LearnersSeeWhatTheySeeOnTheCpu) {
  const uint64_t count = 100'001;
  const std::vector<float> x = ramp(count);
  std::vector<uint16_t> half(count);
  for (uint64_t i = 0; i < count; ++i) half[i] = f32_to_bf16(x[i]);
  for (const char* spec : {"optquant:bits=3", "casq:bits=2", "casq:bits=2,mode=paper", "rangefloat", "fft", "dqsgd"}) {
    const auto memory = memory_of(gpu.device());
    void* device = memory->allocate(count * 4);
    memory->from_host(device, x.data(), count * 4);
    EXPECT_EQ(fit(Codec::parse(spec), device, count, DType::f32, gpu.device()),
              fit(Codec::parse(spec), x.data(), count, DType::f32))
        << spec;
    memory->from_host(device, half.data(), count * 2);
    EXPECT_EQ(fit(Codec::parse(spec), device, count, DType::bf16, gpu.device()),
              fit(Codec::parse(spec), half.data(), count, DType::bf16))
        << spec;
    memory->release(device);
  }
  // With feedback, and more picks than one launch takes.
  const Plan plan({{"a", count, DType::f32, Codec::parse("qsgd")},
                   {"b", 0, DType::f32, Codec()},
                   {"c", 33, DType::f32, Codec::parse("qsgd:bucket=64")}});
  const std::vector<float> tail = ramp(33), owed = ramp(count + 5), owed_tail = ramp(40);
  const auto look = [&](const Device& device) {
    const auto memory = memory_of(device);
    std::vector<void*> held;
    const auto put = [&](const std::vector<float>& values, uint64_t n) {
      held.push_back(memory->allocate(n * 4 + 4));
      memory->from_host(held.back(), values.data(), n * 4);
      return held.back();
    };
    const std::vector<const void*> in = {put(x, count), nullptr, put(tail, 33)},
                                   before = {put(owed, count), nullptr, put(owed_tail, 33)};
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
    const std::span<const uint32_t> sides = runner->scales({message, plan.message_bytes()}, which);
    runner->wait();
    std::pair<std::vector<float>, std::vector<uint32_t>> seen({sample.begin(), sample.end()},
                                                              {sides.begin(), sides.end()});
    memory->release(message);
    for (void* p : held) memory->release(p);
    return seen;
  };
  const auto here = look(cpu.device()), there = look(gpu.device());
  EXPECT_EQ(here.first.size(), 138u * 1024);
  EXPECT_EQ(here.second.size(), 1u + 98);
  EXPECT_EQ(here, there);
}

// ---- reductions

void check_cuda(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  ADD_FAILURE() << what << ": " << cudaGetErrorString(code);
  throw std::runtime_error(what);  // ends this rank; run_loopback tells the others
}

// A stream that does not wait for the default one, so that nothing is right by accident.
class CudaStream {
 public:
  CudaStream() {
    check_cuda(cudaSetDevice(0), "cudaSetDevice");
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  ~CudaStream() { cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Tensors where a rank's device has them.
class Placed {
 public:
  Placed(const TensorValues& data, const Device& device) : data_(data), memory_(memory_of(device)) {
    for (const auto& bytes : data_.bytes) {
      at_.push_back(memory_->allocate(bytes.size()));
      memory_->from_host(at_.back(), bytes.data(), bytes.size());
    }
  }
  ~Placed() {
    for (void* p : at_) memory_->release(p);
  }
  Placed(const Placed&) = delete;
  Placed& operator=(const Placed&) = delete;
  std::vector<const void*> in() const { return {at_.begin(), at_.end()}; }
  const std::vector<void*>& out() const { return at_; }
  TensorValues read() const {
    TensorValues data = data_;
    for (size_t i = 0; i < at_.size(); ++i) memory_->to_host(data.bytes[i].data(), at_[i], data.bytes[i].size());
    return data;
  }

 private:
  TensorValues data_;
  std::shared_ptr<Memory> memory_;
  std::vector<void*> at_;
};

enum class Where { cpu, gpu, mixed };

Device device_of(Where where, const Engine& engine, const CudaStream& stream) {
  const bool cuda = where == Where::gpu || (where == Where::mixed && engine.rank() % 2 == 1);
  return cuda ? Device{.kind = Device::Kind::cuda, .stream = stream.get()} : Device{};
}

// A unit and more, tails, pieces for every owner, all element types, nothing at all.
const std::vector<NamedTensor> kTensors{{"w", 100'003, DType::f32, 2},
                                        {"h", 70'001, DType::f16, 2},
                                        {"b", 300, DType::f32, 1},
                                        {"g", 5'000, DType::bf16, 2},
                                        {"none", 0, DType::f32, 2}};

// What one rank saw: the outputs of every step, and the state after it.
struct Course {
  std::vector<TensorValues> outputs;
  std::vector<uint64_t> states;
  uint64_t bytes = 0;
};

// Four steps; in the third, rank 1 has an Inf in an f32 tensor and one in an f16 one, and it is rolled back.
std::vector<Course> reduce_steps(Where where, ReduceOptions options, int world, float loss_scale, bool in_place) {
  PerRank<Course> courses(world);
  run_loopback(world, [&](Engine& engine) {
    const CudaStream stream;
    ReduceOptions own = options;
    own.commit = ReduceOptions::Commit::manual;
    own.device = device_of(where, engine, stream);
    Course& course = courses.of(engine);
    {
      Reducer reducer(engine, kTensors, own);
      for (uint64_t step = 0; step < 4; ++step) {
        reducer.set_rate(0.5 / static_cast<double>(1 + step));
        TensorValues data = gradients(kTensors, engine.rank(), step);
        if (step == 2 && engine.rank() == 1) {
          data.set(0, 50'000, HUGE_VALF);
          data.set(1, 69'999, -HUGE_VALF);
        }
        const Placed in(data, own.device), out(TensorValues(kTensors), own.device);
        const Placed& to = in_place ? in : out;
        reducer.run(step, in.in(), to.out(), loss_scale);
        if (step == 2)
          reducer.rollback(step);
        else
          reducer.commit(step);
        course.outputs.push_back(to.read());
        course.states.push_back(reducer.feedback().hash());
      }
      course.bytes = reducer.message_bytes();
      if (own.device.kind == Device::Kind::cuda) {
        const ReduceTimes times = reducer.times();
        EXPECT_GT(times.encode, 0);
        EXPECT_GT(times.wait, 0);
        EXPECT_GT(times.decode, 0);
        EXPECT_EQ(reducer.memory().residuals, reducer.feedback().bytes());
      }
    }
  });
  return courses.values;
}

void expect_same(const std::vector<Course>& found, const std::vector<Course>& expected, const std::string& what) {
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    EXPECT_EQ(found[rank].bytes, expected[rank].bytes) << what << " rank " << rank;
    for (size_t step = 0; step < 4; ++step) {
      EXPECT_EQ(found[rank].states[step], expected[rank].states[step])
          << what << ": residuals or what was learned, rank " << rank << " step " << step;
      for (size_t t = 0; t < kTensors.size(); ++t)
        EXPECT_TRUE(found[rank].outputs[step].bytes[t] == expected[rank].outputs[step].bytes[t])
            << what << ": '" << kTensors[t].name << "', rank " << rank << " step " << step;
    }
  }
}

std::vector<std::string> reduced_specs() {
  std::vector<std::string> specs;
  for (const CodecInfo& info : codecs()) specs.push_back(info.name);
  for (const char* spec : {"qsgd:bits=3,bucket=128", "topk:mode=paper", "onebit:mode=paper", "optquant:bits=3,refit=1",
                           "optquant:bits=2,mode=biased,refit=2", "casq:bits=2,refit=1,start=1",
                           "casq:bits=1,mode=paper,refit=1", "casq:bits=2,mode=paper,counts=on,refit=1",
                           "dqsgd:budget=3.5,steps=4", "dqsgd:budget=3,mode=paper,steps=4", "rangefloat:bits=6,refit=1",
                           "fft:theta=0.8,refit=1", "fft:theta=0.9,schedule=rate,smooth=2", "1d=fp32;h=fp16;*=onebit"})
    specs.push_back(spec);
  return specs;
}

TEST_F(Cuda, AReducerGivesTheBitsOfTheCpus) {
  for (const std::string& spec : reduced_specs())
    for (Method method : kMethods) {
      const ReduceOptions options{.method = method, .up = spec, .seed = 7};
      const std::string what = spec + " " + name_of(method);
      const std::vector<Course> cpu = reduce_steps(Where::cpu, options, 3, 1.0f, false);
      bool marked = false;
      for (uint64_t i = 0; i < kTensors[0].count; ++i) marked |= std::isnan(cpu[0].outputs[2].get(0, i));
      EXPECT_TRUE(marked) << what << ": the Inf of rank 1 went unseen";
      expect_same(reduce_steps(Where::gpu, options, 3, 1.0f, false), cpu, what);
      if (::testing::Test::HasFailure()) return;  // one codec is enough to read
    }
}

TEST_F(Cuda, AReducerGivesTheBitsOfTheCpusUnderEveryOption) {
  for (const char* spec : {"qsgd:bits=4", "casq:bits=2,mode=paper,counts=on,refit=1", "topk"})
    for (Method method : kMethods)
      for (Op op : {Op::mean, Op::sum})
        for (DType residual : {DType::f32, DType::bf16}) {
          const ReduceOptions options{
              .method = method, .op = op, .up = spec, .feedback = Feedback::on, .residual = residual, .seed = 3};
          expect_same(reduce_steps(Where::gpu, options, 4, 1024.0f, true),
                      reduce_steps(Where::cpu, options, 4, 1024.0f, true), std::string(spec) + " " + name_of(method));
        }
}

TEST_F(Cuda, RanksOnTheCpuAndOnAGpuWorkTogether) {
  for (const char* spec :
       {"fp32", "qsgd:bits=4", "onebit", "dqsgd:budget=3,mode=paper,steps=4", "fft:theta=0.8,refit=1"})
    for (Method method : kMethods) {
      const ReduceOptions options{.method = method, .up = spec};
      expect_same(reduce_steps(Where::mixed, options, 4, 1.0f, false),
                  reduce_steps(Where::cpu, options, 4, 1.0f, false), std::string(spec) + " " + name_of(method));
    }
}

TEST_F(Cuda, TheHalvesGiveTheBitsOfTheCpus) {
  const int world = 3;
  const auto run = [&](Where where, const char* spec) {
    PerRank<std::vector<TensorValues>> seen(world);
    PerRank<uint64_t> states(world);
    run_loopback(world, [&](Engine& engine) {
      const CudaStream stream;
      ReduceOptions options{.up = spec, .down = spec, .seed = 5};
      options.device = device_of(where, engine, stream);
      ErrorFeedback feedback(DType::f32, options.device);
      uint64_t mine = 0;
      for (const Shard& shard : shards(kTensors, world)) mine += shard.owner == engine.rank() ? shard.count : 0;
      const Placed in(gradients(kTensors, engine.rank(), 0), options.device),
          out(TensorValues(kTensors), options.device);
      const std::vector<NamedTensor> flat{{"share", mine}};
      const Placed share(TensorValues(flat), options.device);
      const std::span<float> floats(static_cast<float*>(share.out()[0]), mine);
      reduce_scatter(engine, kTensors, options, 1, in.in(), floats, &feedback);
      all_gather(engine, kTensors, options, 1, floats, out.out(), &feedback);
      feedback.commit(1);
      seen.of(engine).push_back(share.read());
      seen.of(engine).push_back(out.read());
      broadcast(engine, kTensors, options, 2, 1, in.out());
      seen.of(engine).push_back(in.read());
      states.of(engine) = feedback.hash();
    });
    return std::pair(seen.values, states.values);
  };
  for (const char* spec : {"fp32", "qsgd:bits=4", "topk", "fft:theta=0.8"}) {
    const auto here = run(Where::cpu, spec), there = run(Where::gpu, spec);
    EXPECT_EQ(here.second, there.second) << spec;
    EXPECT_TRUE(here.first == there.first) << spec;
  }
}

TEST_F(Cuda, AStateIsSavedFromAGpuAndGoesOnThere) {
  const std::string path = ::testing::TempDir() + "gradwire_cuda_state_" + std::to_string(::getpid());
  for (const char* spec : {"onebit", "optquant:bits=3,refit=1"})
    run_loopback(2, [&](Engine& engine) {
      const CudaStream stream;
      const ReduceOptions options{.up = spec, .device = device_of(Where::gpu, engine, stream)};
      const std::string file = path + std::to_string(engine.rank());
      const auto step = [&](Reducer& reducer, uint64_t n) {
        const Placed data(gradients(kTensors, engine.rank(), n), options.device);
        reducer.run(n, data.in(), data.out());
        return data.read();
      };
      Reducer straight(engine, kTensors, options);
      step(straight, 0);
      straight.feedback().save(file);
      const TensorValues expected = step(straight, 1);
      Reducer resumed(engine, kTensors, options);
      resumed.feedback() = ErrorFeedback::load(file, options.device);
      EXPECT_TRUE(step(resumed, 1) == expected) << spec;
      EXPECT_EQ(resumed.feedback().hash(), straight.feedback().hash()) << spec;
      std::remove(file.c_str());
    });
}

TEST_F(Cuda, ResidualsOfAnotherDeviceAreRefusedOnAllRanks) {
  const std::vector<NamedTensor> tensors{{"a", 100}};
  const auto results = outcomes(2, [&](Engine& engine) {
    const CudaStream stream;
    const Device device = device_of(Where::gpu, engine, stream);
    Reducer reducer(engine, tensors, {.up = "onebit", .device = device});
    if (engine.rank() == 1) reducer.feedback() = ErrorFeedback();
    const Placed data(gradients(tensors, 0, 0), device);
    reducer.run(0, data.in(), data.out());
  });
  EXPECT_EQ(results[1].kind, ErrorKind::usage);
  EXPECT_EQ(results[1].field, "feedback") << results[1].text;
  EXPECT_EQ(results[0].kind, ErrorKind::mismatch);
}

}  // namespace
}  // namespace gradwire::test
