// SPDX-License-Identifier: Apache-2.0
#include "codec/refit.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>

#include "core/bits.h"
#include "gradwire/error.h"

namespace gradwire {

void FitStats::add(const FitStats& other) {
  if (other.exponent == kNone) return;
  if (exponent == kNone) {
    *this = other;
    return;
  }
  // The coarser unit stays; what falls off the end of the finer one is below its share of the sum.
  const int64_t top = std::max(exponent, other.exponent);
  const auto shift = [&](int64_t e) { return static_cast<int>(std::min<int64_t>(top - e, 63)); };
  for (size_t i = 0; i < counts.size(); ++i)
    counts[i] = (counts[i] >> shift(exponent)) + (other.counts[i] >> shift(other.exponent));
  exponent = top;
}

double number_of(const Codec& codec, const char* parameter) {
  const std::string text = codec.get(parameter);
  double value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

void refuse_state(const Codec& codec, const std::string& why) {
  throw Error(ErrorKind::frame, fmt::format("learned state of {} {}", codec.name(), why), "learned");
}

WeightedSample::WeightedSample(std::span<const float> values, std::span<const uint32_t> lengths, int digits, By by) {
  const auto size_of = [by](const Unit& unit) { return by == By::top ? static_cast<double>(unit.top) : unit.rms; };
  double largest = 0;
  size_t at = 0;
  for (uint32_t length : lengths) {
    Unit unit{values.subspan(at, length), 0, 0, 0};
    at += length;
    // The bits of magnitudes are in the order of the magnitudes, with those that are not finite at the top.
    uint32_t top = 0;
    for (float v : unit.values) top = std::max(top, float_bits(v) & 0x7fffffff);
    unit.top = bits_float(top);
    if (!std::isfinite(unit.top) || top == 0) continue;
    if (by == By::rms) {
      double squares = 0;
      for (float v : unit.values) squares += static_cast<double>(v) * v;
      unit.rms = std::sqrt(squares / length);
    }
    largest = std::max(largest, size_of(unit));
    units.push_back(unit);
  }
  if (units.empty()) return;
  exponent = 2 * (std::ilogb(largest) + 1) - digits;
  for (Unit& unit : units)
    unit.weight = std::llround(std::ldexp(size_of(unit) * size_of(unit), -static_cast<int>(exponent)));
  std::erase_if(units, [](const Unit& unit) { return unit.weight == 0; });
}

RefitFitter::RefitFitter(const Codec& codec, uint64_t start)
    : base_(codec), start_(start), refit_(static_cast<uint64_t>(number_of(codec, "refit"))) {}

bool RefitFitter::due(uint64_t step) const {
  const uint64_t done = step + 1;
  if (refit_ == 0) return false;
  if (start_ > 0 && done == start_) return true;
  if (done < start_) return false;
  const uint64_t since = done - start_;
  return since > 0 && (since % refit_ == 0 || (since < refit_ && std::has_single_bit(since)));
}

void RefitFitter::learn(uint64_t, const FitStats& pooled) {
  if (pooled.exponent == FitStats::kNone) return;
  table_ = table_of(pooled);
  current_ = base_.fitted(table_);
}

void RefitFitter::restore(std::span<const uint64_t> state) {
  std::vector<uint32_t> table(state.begin(), state.end());
  try {
    current_ = base_.fitted(table);
  } catch (const Error& error) {
    refuse_state(base_, error.what());
  }
  table_ = std::move(table);
}

}  // namespace gradwire
