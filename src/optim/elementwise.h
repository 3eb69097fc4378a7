// SPDX-License-Identifier: Apache-2.0
// How an optimiser's element rule is run over the arrays of all parameters, on the CPU and on a GPU. A rule is a small
// struct of numbers with a call operator for the element `i` of a span:
//
//   struct SomeRule { float rate; GW_HD void operator()(const OptimizerSpan& s, uint64_t i) const { ... } };
//
// Every operation of a rule is one correctly rounded IEEE operation, and no compiler may contract two of them (see
// CMakeLists.txt), so all devices, vector widths and numbers of threads give the same bits. Nothing here is initialised
// at the first call, so two threads that make it at once cannot meet.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/bits.h"
#include "core/pool.h"
#include "device/memory.h"
#include "gradwire/runner.h"

namespace gradwire {

// The arrays of one parameter. A rule says which of them it reads; the others are null. They may not overlap.
struct OptimizerSpan {
  const float* gradient;
  float *first, *second;  // moments
  float* shared;          // qadam: the second moment that is pooled over workers
  float* out;             // the weights that are changed, or qadam's update
  uint64_t count;
};

// Defined in elementwise_cuda.cu for the rules of this folder. It only enqueues.
template <class Rule>
void cuda_elementwise(int index, void* stream, std::span<const OptimizerSpan> spans, const Rule& rule);

class Elementwise {
 public:
  explicit Elementwise(const Device& device) : device_(device) {
    if (device.kind == Device::Kind::cpu && device.threads > 1) pool_ = std::make_unique<Pool>(device.threads);
  }

  template <class Rule>
  void run(std::span<const OptimizerSpan> spans, const Rule& rule) const {
    if (device_.kind == Device::Kind::cuda) return run_cuda(spans, rule);
    std::vector<OptimizerSpan> chunks;
    for (const OptimizerSpan& span : spans)
      for (uint64_t from = 0; from < span.count; from += kChunk) chunks.push_back(chunk_of(span, from));
    if (pool_) return pool_->run(chunks.size(), [&](size_t task, int) { run_chunk(chunks[task], rule); });
    for (const OptimizerSpan& chunk : chunks) run_chunk(chunk, rule);
  }

 private:
  static constexpr uint64_t kChunk = uint64_t{1} << 16;  // elements that one thread takes at a time

  template <class Rule>
  void run_cuda(std::span<const OptimizerSpan> spans, const Rule& rule) const {
#ifdef GRADWIRE_HAS_CUDA
    cuda_elementwise(device_.index, device_.stream, spans, rule);
#else
    (void)spans, (void)rule;
    no_cuda();
#endif
  }

  template <class T>
  static T* moved(T* pointer, uint64_t by) {
    return pointer ? pointer + by : nullptr;
  }
  static OptimizerSpan chunk_of(const OptimizerSpan& s, uint64_t from) {
    return {.gradient = moved(s.gradient, from),
            .first = moved(s.first, from),
            .second = moved(s.second, from),
            .shared = moved(s.shared, from),
            .out = moved(s.out, from),
            .count = std::min(kChunk, s.count - from)};
  }

  // The loop is plain, so that the compiler makes vectors of it. The arrays do not overlap, which the pragma says in
  // place of a test at run time for every pair of them.
  template <class Rule>
  static void run_chunk(const OptimizerSpan span, const Rule rule) {
#pragma GCC ivdep
    for (uint64_t i = 0; i < span.count; ++i) rule(span, i);
  }

  Device device_;
  std::unique_ptr<Pool> pool_;
};

}  // namespace gradwire
