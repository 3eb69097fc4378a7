// SPDX-License-Identifier: Apache-2.0
// See qadam.h.
#include "optim/qadam.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/check.h"
#include "device/memory.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

void require(const char* field, bool fine, double value, const char* allowed) {
  if (!fine) throw Error(ErrorKind::usage, fmt::format("{} is {}; allowed is {}", field, value, allowed), field);
}

QAdamNumbers numbers_of(const QAdamOptions& options, uint64_t taken, double rate, bool moves) {
  const auto k = static_cast<double>(std::max<uint64_t>(1, taken));
  const double beta = options.beta, theta = options.theory ? 1 - options.theta / k : options.theta;
  QAdamNumbers n{
      .beta = 1, .fresh = 0, .theta = 1, .fresh_square = 0, .rate = static_cast<float>(rate), .root = 1, .epsilon = 0};
  if (moves) {
    n.beta = static_cast<float>(beta);
    n.fresh = static_cast<float>(1 - beta);
    n.theta = static_cast<float>(theta);
    n.fresh_square = static_cast<float>(1 - theta);
  }
  if (options.correction && !options.theory) {
    n.rate = static_cast<float>(rate / (1 - std::pow(beta, k)));
    n.epsilon = static_cast<float>(options.epsilon);
    n.root = static_cast<float>(std::sqrt(qadam_correction(options, taken)));
  }
  return n;
}

}  // namespace

void check(const QAdamOptions& options) {
  require("beta", options.beta >= 0 && options.beta < 1, options.beta, "0 to 1, without 1");
  require("theta", options.theta > 0 && (options.theory ? options.theta <= 1 : options.theta < 1), options.theta,
          options.theory ? "above 0, to 1" : "above 0 and below 1");
  require("epsilon", options.epsilon > 0 && options.epsilon <= 1, options.epsilon, "above 0, to 1");
  require("share_every", options.share_every > 0, static_cast<double>(options.share_every), "at least 1");
}

// A worker that has taken no step knows nothing: zeros, as they are.
double qadam_correction(const QAdamOptions& options, uint64_t taken) {
  const bool corrects = options.correction && !options.theory && taken > 0;
  return corrects ? 1 - std::pow(options.theta, static_cast<double>(taken)) : 1;
}

bool qadam_pools(const QAdamOptions& options, uint64_t step) {
  if (!options.shared) return false;
  const uint64_t number = step + 1;
  return number < options.share_every ? std::has_single_bit(number) : number % options.share_every == 0;
}

void qadam_step(const Elementwise& device, std::span<const OptimizerSpan> spans, const QAdamOptions& options,
                uint64_t taken, double rate, bool moves) {
  const QAdamNumbers numbers = numbers_of(options, taken, rate, moves);
  if (moves)
    options.shared ? device.run(spans, QAdamRule<true, true>{numbers})
                   : device.run(spans, QAdamRule<true, false>{numbers});
  else
    options.shared ? device.run(spans, QAdamRule<false, true>{numbers})
                   : device.run(spans, QAdamRule<false, false>{numbers});
}

// One block of memory, an array a parameter, each on a cache line of its own.
struct QAdam::ParameterArrays {
  ParameterArrays(std::shared_ptr<Memory> m, std::span<const uint64_t> counts) : memory(std::move(m)) {
    for (const uint64_t count : counts) {
      offsets.push_back(floats);
      floats += (count + 15) / 16 * 16;
    }
    data = static_cast<float*>(memory->allocate(std::max<uint64_t>(1, floats) * sizeof(float)));
    memory->zero(data, floats * sizeof(float));
  }
  ~ParameterArrays() { memory->release(data); }
  float* at(size_t parameter) const { return data + offsets[parameter]; }

  std::shared_ptr<Memory> memory;
  std::vector<uint64_t> offsets;
  uint64_t floats = 0;
  float* data = nullptr;
};

QAdam::QAdam(std::vector<uint64_t> counts, const QAdamOptions& options, const Device& device)
    : counts_(std::move(counts)), options_(options), device_(device), memory_(memory_of(device)), elementwise_(device) {
  check(options);
  if (options_.theory) options_.correction = false;
  first_ = std::make_unique<ParameterArrays>(memory_, counts_);
  second_ = std::make_unique<ParameterArrays>(memory_, counts_);
  if (options_.shared) shared_ = std::make_unique<ParameterArrays>(memory_, counts_);
  if (!options_.correction) {
    const auto most = counts_.empty() ? 0 : *std::max_element(counts_.begin(), counts_.end());
    const std::vector<float> start(most, static_cast<float>(options_.epsilon));
    for (const Moment moment : moments())
      for (size_t i = 0; moment != Moment::first && i < counts_.size(); ++i)
        write(moment, i, {start.data(), counts_[i]});
  }
}

QAdam::~QAdam() = default;

void QAdam::step(double rate, std::span<const float* const> gradients, std::span<float* const> updates) {
  GW_CHECK(gradients.size() == counts_.size());
  ++taken;
  run(rate, gradients, updates);
}

void QAdam::again(double rate, std::span<float* const> updates) { run(rate, {}, updates); }

void QAdam::run(double rate, std::span<const float* const> gradients, std::span<float* const> updates) {
  GW_CHECK(updates.size() == counts_.size());
  std::vector<OptimizerSpan> spans;
  for (size_t i = 0; i < counts_.size(); ++i)
    spans.push_back({.gradient = gradients.empty() ? nullptr : gradients[i],
                     .first = first_->at(i),
                     .second = second_->at(i),
                     .shared = shared_ ? shared_->at(i) : nullptr,
                     .out = updates[i],
                     .count = counts_[i]});
  qadam_step(elementwise_, spans, options_, taken, rate, !gradients.empty());
}

void QAdam::pool(const std::function<void(std::span<float* const>)>& mean) {
  GW_CHECK(options_.shared);
  const auto correct = static_cast<float>(qadam_correction(options_, taken));
  std::vector<std::vector<float>> values;
  std::vector<float*> pointers;
  for (size_t i = 0; i < counts_.size(); ++i) {
    values.push_back(read(Moment::second, i));
    for (float& value : values.back()) value /= correct;
    pointers.push_back(values.back().data());
  }
  mean(pointers);
  for (size_t i = 0; i < counts_.size(); ++i) {
    for (float& value : values[i]) value *= correct;  // as young as this worker's own
    write(Moment::shared, i, values[i]);
  }
}

std::vector<QAdam::Moment> QAdam::moments() const {
  std::vector<Moment> all{Moment::first, Moment::second};
  if (options_.shared) all.push_back(Moment::shared);
  return all;
}

QAdam::ParameterArrays& QAdam::arrays(Moment moment) const {
  return moment == Moment::first ? *first_ : moment == Moment::second ? *second_ : *shared_;
}

std::vector<float> QAdam::read(Moment moment, size_t parameter) const {
  std::vector<float> values(counts_.at(parameter));
  memory_->to_host(values.data(), arrays(moment).at(parameter), values.size() * sizeof(float));
  return values;
}

void QAdam::write(Moment moment, size_t parameter, std::span<const float> values) {
  GW_CHECK(values.size() == counts_.at(parameter));
  memory_->from_host(arrays(moment).at(parameter), values.data(), values.size_bytes());
}

uint64_t QAdam::bytes() const { return moments().size() * first_->floats * sizeof(float); }

}  // namespace gradwire
