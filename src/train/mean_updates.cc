// SPDX-License-Identifier: Apache-2.0
#include "train/mean_updates.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/bits.h"
#include "core/check.h"

namespace gradwire::train {
namespace {

constexpr const char* kLearned = "weights";  // among the extra state of the residuals

bool finite(std::span<const float> values) {
  uint32_t largest = 0;
  for (const float value : values) largest = std::max(largest, float_bits(value) & 0x7fffffffu);
  return largest < kInfBits;
}

template <class T, class From>
std::vector<T*> pointers(From& arrays) {
  std::vector<T*> list;
  for (auto& array : arrays) list.push_back(array.data());
  return list;
}

}  // namespace

MeanUpdates::MeanUpdates(Engine& engine, std::vector<NamedTensor> tensors, ReduceOptions options,
                         const std::string& down, std::chrono::milliseconds timeout)
    : engine_(engine.split(0)), tensors_(std::move(tensors)), options_(std::move(options)), timer_(options_.device) {
  engine_->set_timeout(timeout);
  GW_CHECK(options_.device.kind == Device::Kind::cpu);
  if (options_.method == ReduceOptions::Method::gather) options_.down.clear();  // `down` is for the weights
  reducer_ = std::make_unique<Reducer>(*engine_, tensors_, options_);
  weights_ = make_arrays();
  means_ = make_arrays();
  if (options_.method == ReduceOptions::Method::scatter) return;
  const Rules rules = Rules::parse(down);
  std::vector<TensorSpec> specs;
  for (const NamedTensor& one : tensors_)
    specs.push_back({.name = one.name,
                     .count = one.count,
                     .dtype = DType::f32,
                     .codec = rules.codec_for(one.name, one.dimensions, one.count)});
  writer_.emplace(std::move(specs), Direction::down, options_.device, server::ShardRun{.steps = options_.steps});
}

MeanUpdates::Arrays MeanUpdates::make_arrays() const {
  Arrays arrays;
  for (const NamedTensor& one : tensors_) arrays.emplace_back(one.count);
  return arrays;
}

uint64_t MeanUpdates::begin(std::span<float* const> weights) {
  GW_CHECK(weights.size() == tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) std::copy_n(weights[i], tensors_[i].count, weights_[i].data());
  send_down(0, weights);
  return 0;
}

StepResult MeanUpdates::exchange(uint64_t step, std::span<const float* const> updates, std::span<float* const> weights,
                                 const Report& report) {
  if (updates.empty() && !tensors_.empty()) {
    // The other workers learn of it by a mean that is not a number.
    Arrays nothing = make_arrays();
    for (auto& array : nothing) std::fill(array.begin(), array.end(), std::numeric_limits<float>::quiet_NaN());
    return exchange(step, pointers<const float>(nothing), weights, report);
  }
  resume_learning();
  reducer_->set_rate(report.rate);
  const std::vector<const void*> in(updates.begin(), updates.end());
  reducer_->run(step, in, pointers<void>(means_));
  // The reducer has committed the step by the same rule. All workers see the same means, so all decide alike.
  if (!std::all_of(means_.begin(), means_.end(), [](const auto& mean) { return finite(mean); })) {
    return {.next = step + 1, .applied = false};
  }
  {
    const ScopedTimer scope = timer_.decode();
    for (size_t i = 0; i < tensors_.size(); ++i)
      std::transform(weights_[i].begin(), weights_[i].end(), means_[i].begin(), weights_[i].begin(), std::minus<>());
  }
  send_down(step + 1, weights);
  return {.next = step + 1, .applied = true};
}

void MeanUpdates::send_down(uint64_t step, std::span<float* const> weights) {
  if (!writer_) {
    for (size_t i = 0; i < tensors_.size(); ++i) std::copy(weights_[i].begin(), weights_[i].end(), weights[i]);
    return;
  }
  const Stamp stamp{
      .seed = options_.seed, .step = step, .stage = static_cast<uint32_t>(Direction::down), .rank = 0, .world = 1};
  Runner& runner = writer_->runner(step);
  message_.resize(writer_->message_bytes());
  {
    const ScopedTimer scope = timer_.encode();
    const std::vector<const void*> in = pointers<const void>(weights_);
    runner.encode(in, stamp, message_);
    server::ShardLearning& learning = writer_->learning();
    if (learning.due(step, step)) {
      const std::vector<std::byte> statistics = learning.observe(runner, step, step, in, nullptr, message_);
      const std::span<const std::byte> all[] = {statistics};
      learning.learn(step, all);
      reducer_->feedback().set_extra(kLearned, learning.save());
    }
  }
  const ScopedTimer scope = timer_.decode();
  const std::vector<void*> out(weights.begin(), weights.end());
  runner.decode(message_, out, Write::set, &stamp);
  runner.wait();
}

// A run that is resumed has its residuals assigned, and with them what the codecs of weights have learned.
void MeanUpdates::resume_learning() {
  if (!writer_ || std::exchange(resumed_, true)) return;
  const auto& extras = reducer_->feedback().extras();
  if (const auto found = extras.find(kLearned); found != extras.end()) writer_->learning().restore(found->second);
}

void MeanUpdates::pool(uint64_t step, std::span<float* const> second) {
  if (!second_) {
    ReduceOptions exact = options_;
    exact.method = ReduceOptions::Method::scatter;  // sums run in rank order, as with gather, in less memory
    exact.up = exact.down = "fp32";
    second_ = std::make_unique<Reducer>(*engine_, tensors_, exact);
  }
  const std::vector<const void*> in(second.begin(), second.end());
  const std::vector<void*> out(second.begin(), second.end());
  second_->run(step, in, out);
}

double MeanUpdates::bits() const {
  uint64_t bytes = 0, elements = 0;
  for (const uint64_t codes : reducer_->encoded_bytes(Direction::up)) bytes += codes;
  for (const NamedTensor& one : tensors_) elements += one.count;
  return 8.0 * static_cast<double>(bytes) / static_cast<double>(std::max<uint64_t>(1, elements));
}

ExchangeStats MeanUpdates::stats() const {
  ExchangeStats all{
      .bits = bits(), .bytes_sent = engine_->bytes_sent(), .times = reducer_->times(), .memory = reducer_->memory()};
  all.times += timer_.times();
  if (second_) all.times += second_->times();
  all.memory.messages += message_.size() + (second_ ? second_->memory().messages : 0);
  for (const auto& array : means_) all.memory.sums += 2 * array.size() * sizeof(float);  // the means and the weights
  return all;
}

std::vector<std::span<float>> MeanUpdates::held() {
  std::vector<std::span<float>> all;
  for (auto& array : weights_) all.emplace_back(array);
  return all;
}

}  // namespace gradwire::train
