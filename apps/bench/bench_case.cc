// SPDX-License-Identifier: Apache-2.0
// A benchmark case and its verification against the scalar reference loop: see bench_case.h.
#include "bench/bench_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "core/bits.h"
#include "core/check.h"

namespace gradwire::app {
namespace {

std::vector<TensorSpec> specs(const std::vector<NamedTensor>& tensors, const BenchCaseOptions& options) {
  std::vector<TensorSpec> list;
  for (const NamedTensor& tensor : tensors) list.push_back({tensor.name, tensor.count, options.dtype, options.codec});
  return list;
}

void* advance(void* base, uint64_t bytes) { return static_cast<std::byte*>(base) + bytes; }

}  // namespace

BenchCase::BenchCase(BenchBackend& backend, const std::vector<NamedTensor>& tensors, const BenchCaseOptions& options,
                     std::span<const float> values, size_t sets)
    : backend_(backend),
      options_(options),
      plan_(specs(tensors, options)),
      runner_(make_runner(plan_, backend.device())) {
  constexpr uint64_t kPad = 64;  // as allocators align tensors
  for (const NamedTensor& tensor : tensors) {
    offsets_.push_back(padded_);
    elements_ += tensor.count;
    padded_ += (tensor.count + kPad - 1) / kPad * kPad;
  }
  GW_CHECK(values.size() == elements_);
  const size_t width = bytes_of(options.dtype);
  std::vector<std::byte> host(padded_ * width);
  const float* next = values.data();
  for (size_t t = 0; t < tensors.size(); ++t) {
    std::byte* place = host.data() + offsets_[t] * width;
    for (uint64_t i = 0; i < tensors[t].count; ++i, ++next) {
      if (options.dtype == DType::f32) {
        std::memcpy(place + 4 * i, next, 4);
      } else {
        const uint16_t bits = options.dtype == DType::f16 ? f32_to_f16(*next) : f32_to_bf16(*next);
        std::memcpy(place + 2 * i, &bits, 2);
      }
    }
  }
  const size_t residual_width = bytes_of(options.residual);
  for (size_t s = 0; s < sets; ++s) {
    Set set{};
    set.input = backend.allocate(padded_ * width);
    set.output = backend.allocate(padded_ * width);
    set.copied = backend.allocate(padded_ * width);
    set.before = backend.allocate(padded_ * residual_width);
    set.after = backend.allocate(padded_ * residual_width);
    set.frame = backend.allocate(frame_bytes());
    backend.upload(set.input, host.data(), host.size());
    for (uint64_t offset : offsets_) {
      set.inputs.push_back(advance(set.input, offset * width));
      set.outputs.push_back(advance(set.output, offset * width));
      set.befores.push_back(advance(set.before, offset * residual_width));
      set.afters.push_back(advance(set.after, offset * residual_width));
    }
    sets_.push_back(std::move(set));
  }
  // One step replaces the zero residuals by realistic ones, from which every later step starts.
  for (size_t s = 0; s < sets; ++s) {
    feedback(s);
    std::swap(sets_[s].before, sets_[s].after);
    for (size_t t = 0; t < offsets_.size(); ++t) {
      sets_[s].befores[t] = advance(sets_[s].before, offsets_[t] * residual_width);
      sets_[s].afters[t] = advance(sets_[s].after, offsets_[t] * residual_width);
    }
    encode(s);  // every set now holds a frame, so that decode may come first
  }
  runner_->wait();
}

void BenchCase::encode(uint64_t turn) {
  Set& set = set_of(turn);
  runner_->encode(set.inputs, Stamp{.seed = 1, .step = turn}, {static_cast<std::byte*>(set.frame), frame_bytes()});
}

void BenchCase::feedback(uint64_t turn) {
  Set& set = set_of(turn);
  Residuals residuals{.before = set.befores, .after = set.afters, .dtype = options_.residual};
  runner_->encode(set.inputs, Stamp{.seed = 1, .step = turn}, {static_cast<std::byte*>(set.frame), frame_bytes()},
                  &residuals);
}

void BenchCase::decode(uint64_t turn) {
  Set& set = set_of(turn);
  runner_->decode({static_cast<const std::byte*>(set.frame), frame_bytes()}, set.outputs);
}

void BenchCase::copy(uint64_t turn) {
  Set& set = set_of(turn);
  backend_.copy(set.copied, set.input, tensor_bytes());
}

std::vector<float> BenchCase::download(const void* from) {
  std::vector<std::byte> host(padded_ * bytes_of(options_.dtype));
  backend_.download(host.data(), from, host.size());
  std::vector<float> values;
  values.reserve(elements_);
  for (size_t t = 0; t < offsets_.size(); ++t) {
    for (uint64_t i = offsets_[t]; i < offsets_[t] + plan_.tensors()[t].count; ++i) {
      if (options_.dtype == DType::f32) {
        float value;
        std::memcpy(&value, host.data() + 4 * i, 4);
        values.push_back(value);
      } else {
        uint16_t bits;
        std::memcpy(&bits, host.data() + 2 * i, 2);
        values.push_back(options_.dtype == DType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits));
      }
    }
  }
  return values;
}

std::vector<float> BenchCase::decoded() { return download(sets_[0].output); }
std::vector<float> BenchCase::input() { return download(sets_[0].input); }

std::vector<std::byte> BenchCase::frame() {
  std::vector<std::byte> bytes(frame_bytes());
  backend_.download(bytes.data(), sets_[0].frame, bytes.size());
  return bytes;
}

std::vector<std::byte> BenchCase::residual() {
  std::vector<std::byte> bytes(padded_ * bytes_of(options_.residual));
  backend_.download(bytes.data(), sets_[0].after, bytes.size());
  return bytes;
}

void verify_against_reference(BenchBackend& backend, const BenchCaseOptions& options, std::span<const float> values) {
  constexpr size_t kSample = (size_t{1} << 20) - 3;  // not a multiple of any unit: tails are compared too
  const std::span<const float> sample = values.first(std::min(values.size(), kSample));
  const std::vector<NamedTensor> tensors = {{"sample", sample.size(), options.dtype, 2}};
  const std::unique_ptr<BenchBackend> scalar = make_backend({.device = "cpu", .threads = 1, .simd = "scalar"});
  BenchCase reference(*scalar, tensors, options, sample, 1);
  BenchCase bench_case(backend, tensors, options, sample, 1);
  const auto demand = [&](bool equal, const char* what) {
    if (!equal)
      throw std::runtime_error(
          fmt::format("verification failed: {}: {} differs from the scalar reference", options.codec.str(), what));
  };
  for (uint64_t step : {0, 1}) {
    for (BenchCase* each : {&reference, &bench_case}) {
      each->encode(step);
      each->wait();
    }
    demand(reference.frame() == bench_case.frame(), "the frame");
    for (BenchCase* each : {&reference, &bench_case}) {
      each->feedback(step);
      each->decode(step);
      each->wait();
    }
    demand(reference.frame() == bench_case.frame(), "the frame with error feedback");
    demand(reference.residual() == bench_case.residual(), "the residual");
    const std::vector<float> expected = reference.decoded(), got = bench_case.decoded();
    demand(std::memcmp(expected.data(), got.data(), expected.size() * sizeof(float)) == 0, "the decoded tensor");
  }
}

}  // namespace gradwire::app
