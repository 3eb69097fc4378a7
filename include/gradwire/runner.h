// SPDX-License-Identifier: Apache-2.0
// A Runner runs a Plan on a device. The caller owns all tensors and message buffers, and on a GPU the stream; the
// runner owns the tables and the workspace that the plan needs there, made once in make_runner(). The bytes it
// produces do not depend on the device, the vector width, the number of threads or the grouping of tensors.
//
//   Plan plan({{"layer.weight", 1'000'000, DType::f32, Codec::parse("qsgd:bits=4")}});
//   auto runner = make_runner(plan, Device{});
//   std::vector<std::byte> message(plan.message_bytes());
//   const void* in[] = {gradient.data()};
//   runner->encode(in, Stamp{.seed = 1, .step = 7}, message);
//   void* out[] = {restored.data()};
//   runner->decode(message, out);
//
// Threads: a runner belongs to one thread at a time: no two of its functions may run at once, wait() and poll()
// included. Different runners are independent, also those of one plan. On the CPU a call returns when its work is done;
// Device::threads says how many threads share it. On a GPU a call enqueues its work on the stream and returns.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gradwire/plan.h"

namespace gradwire {

struct Device {
  enum class Kind { cpu, cuda };
  Kind kind = Kind::cpu;
  int threads = 1;         // cpu
  std::string simd = {};   // cpu: "" the best the processor has, "scalar" the reference loop, or one of simd_targets()
  int index = 0;           // cuda
  void* stream = nullptr;  // cuda: a cudaStream_t
  // cuda: 8 bytes of the GPU's memory that hold the step. Kernels then read it there, and a stamp's own is not used: so
  // what was recorded in a CUDA graph is of the step in which it runs. Null: steps are those of the stamps.
  uint64_t* clock = nullptr;
};

// Error feedback in the encode pass: x = g + loss_scale * decay * before; after = (x - decode(encode(x))) / loss_scale.
// One entry per tensor; null pointers mean no feedback for that tensor. `before` and `after` may not overlap. A unit
// that holds a NaN or an Inf keeps its residual: after = before.
struct Residuals {
  std::span<const void* const> before;
  std::span<void* const> after;
  DType dtype = DType::f32;  // f32 or bf16
  float loss_scale = 1.0f;   // gradients arrive multiplied by it; residuals are stored without it
  float decay = 1.0f;        // above 0, to 1: what is left of an old residual when it is added
};

// A block of 1024 elements of a tensor of the plan.
struct Pick {
  uint32_t tensor;
  uint64_t block;
};

enum class Write { set, add };  // out = decoded, or out += decoded (f32 outputs only)

class Runner {
 public:
  virtual ~Runner() = default;

  // `message` must hold plan.message_bytes() bytes. Pointers are device pointers on a GPU.
  virtual void encode(std::span<const void* const> tensors, const Stamp& stamp, std::span<std::byte> message,
                      const Residuals* residuals = nullptr) = 0;

  // Throws Error{frame} naming the field when the message is not one of this plan, or is damaged; with `expected`,
  // also when step, stage, rank or world differ. On the CPU nothing is written when the checksum is wrong. On a GPU
  // the call only enqueues: a bad message fills the outputs with NaN and the error appears at wait().
  virtual void decode(std::span<const std::byte> message, std::span<void* const> tensors, Write write = Write::set,
                      const Stamp* expected = nullptr) = 0;

  // What learning codecs are fitted to (learn.h). Both functions return memory of the runner on the host. It holds the
  // values after wait() and until the next call of the same function. sample() gives the picked blocks as f32, feedback
  // added, with zeros behind the end of a tensor. scales() gives the first scale word of every unit of the tensors
  // `which`, in order, from a message that this runner encoded.
  virtual std::span<const float> sample(std::span<const void* const> tensors, const Residuals* residuals,
                                        std::span<const Pick> picks) = 0;
  virtual std::span<const uint32_t> scales(std::span<const std::byte> message, std::span<const uint32_t> which) = 0;

  virtual void wait() = 0;  // until everything enqueued is done; throws what went wrong
  virtual void poll() = 0;  // reports errors that are known by now; enqueues nothing and never blocks
  virtual const Plan& plan() const = 0;

  // Goes on with a plan of the same tensors whose codecs differ in nothing but what they have learned, after what was
  // enqueued. The plan must outlive the runner. False: this runner cannot, and nothing has changed.
  virtual bool retable(const Plan& /*plan*/) { return false; }
};

// The plan must outlive the runner, so it may not be a temporary.
std::unique_ptr<Runner> make_runner(const Plan& plan, const Device& device);
std::unique_ptr<Runner> make_runner(Plan&& plan, const Device& device) = delete;

std::vector<std::string> simd_targets();  // the vector targets that this build has and this processor runs, best first
bool cuda_built();                        // this build has the CUDA drivers
int cuda_devices();                       // usable GPUs; 0 without a build or a driver
std::string cuda_description();           // in words, for people

}  // namespace gradwire
