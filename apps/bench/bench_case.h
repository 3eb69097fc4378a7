// SPDX-License-Identifier: Apache-2.0
// A BenchCase is one thing to time: a plan, a runner for it on a backend, and enough sets of buffers that the cache of
// a GPU does not flatter the figures. Benchmarks build one or several of them and call encode, feedback and decode in
// turns.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "bench/backend.h"
#include "gradwire/collective.h"

namespace gradwire::app {

struct BenchCaseOptions {
  Codec codec;
  DType dtype = DType::f32;
  DType residual = DType::f32;
};

class BenchCase {
 public:
  // `values` (f32) fill the tensors, in the order of the list; they are converted to the dtype.
  BenchCase(BenchBackend& backend, const std::vector<NamedTensor>& tensors, const BenchCaseOptions& options,
            std::span<const float> values, size_t sets);

  void encode(uint64_t turn);
  void feedback(uint64_t turn);  // encode with error feedback, starting from the residual that one encode left
  void decode(uint64_t turn);
  void copy(uint64_t turn);  // the plain copy of the same tensors into a warm buffer
  void wait() { runner_->wait(); }

  uint64_t frame_bytes() const { return plan_.message_bytes(); }
  uint64_t tensor_bytes() const { return elements_ * bytes_of(options_.dtype); }
  uint64_t residual_bytes() const { return elements_ * bytes_of(options_.residual); }

  std::vector<std::byte> frame();     // of set 0, on the host
  std::vector<float> decoded();       // of set 0
  std::vector<float> input();         // of set 0, after conversion to the dtype
  std::vector<std::byte> residual();  // the new residual of set 0

 private:
  struct Set {
    void *input, *output, *copied, *before, *after, *frame;
    std::vector<const void*> inputs, befores;
    std::vector<void*> outputs, afters;
  };
  Set& set_of(uint64_t turn) { return sets_[turn % sets_.size()]; }
  std::vector<float> download(const void* from);

  BenchBackend& backend_;
  BenchCaseOptions options_;
  uint64_t elements_ = 0;
  uint64_t padded_ = 0;  // elements with every tensor at a multiple of 64
  std::vector<uint64_t> offsets_;
  Plan plan_;
  std::unique_ptr<Runner> runner_;
  std::vector<Set> sets_;
};

// Throws when the backend's runner and the scalar reference differ in one bit of frame, decoded tensor or residual, on
// the first million elements of `values`.
void verify_against_reference(BenchBackend& backend, const BenchCaseOptions& options, std::span<const float> values);

}  // namespace gradwire::app
