// SPDX-License-Identifier: Apache-2.0
// In terms of logarithms to base 2: e is that of a step's norm with its weight, and a step takes bit B + 1 after bit B
// if 2 e + gain(B) exceeds the logarithm of the price.
#include "codec/dqsgd/budget.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <numbers>
#include <string>

#include "gradwire/error.h"

namespace gradwire {
namespace {

constexpr size_t kStateWords = 11;        // of save()
constexpr double kPriorSpread = 6.64;     // convex: how far off the fall over a run may be
constexpr double kPriorScatter = 0.1;     // convex: the variance of log2 of the norm about its line
constexpr double kFirstScatter = 0.0625;  // the same before any was seen: norms that scatter by a sixth of themselves
constexpr double kLeastScatter = 0.0025;
constexpr double kMostScatter = 1;     // a single outlier says little about the others
constexpr double kForget = 0.03;       // of the level and of the scatter, per step
constexpr double kForgetBurst = 0.7;   // what is kept of the level when a burst has ended
constexpr double kForgetRecent = 0.3;  // of what stands for a norm that is not known yet

void require(bool fine, const char* field, double value, const char* allowed) {
  if (!fine) {
    throw Error(ErrorKind::usage, fmt::format("{} is {}; expected {}", field, value, allowed), field);
  }
}

double width(double e) { return (e > 60 ? e : std::log2(std::exp2(e) + 1)) + 1; }
double gain(int bits) {
  const double coarse = std::exp2(bits - 1) - 1, fine = std::exp2(bits) - 1;
  return std::log2(1 / (coarse * coarse) - 1 / (fine * fine));
}

double normal(double z) { return std::erfc(-z * std::numbers::sqrt2 / 2) / 2; }
// The integral of normal() from minus infinity to z.
double ramp(double z) { return z * normal(z) + std::exp(-z * z / 2) / std::sqrt(2 * std::numbers::pi); }

// The widths that a price leads to.
struct PricedWidths {
  int least, most;
  double gains[32];

  PricedWidths(int low, int high) : least(low), most(high) {
    for (int bits = low; bits < high; ++bits) gains[bits] = gain(bits);
  }
  int one(double e, double price) const {
    int bits = least;
    while (bits < most && 2 * e + gains[bits] > price) ++bits;
    return bits;
  }
  // The sum over `count` steps whose e is normal about first, first + slope, ... with this spread.
  double expected(double first, double slope, double count, double spread, double price) const {
    double total = least * count;
    const double rise = slope / spread;
    for (int bits = least; bits < most; ++bits) {
      const double z = (2 * first + gains[bits] - price) / (2 * spread);
      if (std::abs(rise) * count < 1e-3)
        total += count * normal(z + rise * (count - 1) / 2);
      else  // each step is a unit interval about its place on the line
        total += (ramp(z + rise * (count - 0.5)) - ramp(z - rise / 2)) / rise;
    }
    return total;
  }
};

}  // namespace

BitController::BitController(const BitRule& rule) : rule_(rule), scatter_(kFirstScatter) {
  require(rule.least >= 2 && rule.least <= rule.most, "min", rule.least, "2 or more and no more than max");
  require(rule.most <= 32, "max", rule.most, "32 or less");
  require(std::isfinite(rule.fall) && rule.fall > 0, "fall", rule.fall, "a finite number above 0");
  if (rule.convex) require(rule.alpha > 0 && rule.alpha <= 1, "alpha", rule.alpha, "above 0 and no more than 1");
  if (rule.form == BitRule::Form::budget) {
    require(rule.budget >= rule.least && rule.budget <= rule.most, "budget", rule.budget, "a mean within min..max");
  } else {
    require(std::isfinite(rule.error) && rule.error > 0, "error", rule.error, "a finite number above 0");
    require(std::isfinite(rule.eta) && rule.eta > 0, "eta", rule.eta, "a finite number above 0");
    require(rule.smooth > 0 && rule.smooth * rule.eta < 2, "smooth", rule.smooth, "above 0 and below 2 / eta");
    require(std::isfinite(rule.dimension) && rule.dimension >= 1, "dimension", rule.dimension, "1 or more");
    require(std::isfinite(rule.workers) && rule.workers >= 1, "workers", rule.workers, "1 or more");
    if (rule.convex) require(rule.steps > 0, "steps", 0, "the length of the run, which the convex rule needs");
    const double common = rule.smooth * rule.dimension / (rule.workers * rule.error);
    scale_ = std::log2(rule.convex ? rule.eta * rule.eta * common * static_cast<double>(rule.steps) / (12 * rule.alpha)
                                   : common * rule.eta / (6 * (2 - rule.smooth * rule.eta))) /
             2;
  }
  memory_ = rule.convex ? 1 - 1 / std::max(10.0, static_cast<double>(rule.steps ? rule.steps : kRollingHorizon) / 20)
                        : 1 - kForget;
}

int BitController::decide(uint64_t step, double norm) {
  if (!(norm > 0) || !std::isfinite(norm)) return 0;
  const double log_norm = std::log2(norm);
  if (step + 1 > learned_) learn(step, log_norm);

  // Beyond the promised end every step is the last one.
  const bool known = rule_.steps > 0;
  const uint64_t end = known ? std::max(rule_.steps, step + 1) : step + kRollingHorizon;
  const double remaining = static_cast<double>(end - step);
  const double fading = rule_.convex && known ? -std::log2(rule_.alpha) / 2 : 0;
  if (rule_.form == BitRule::Form::error) {
    const double bits = std::ceil(width(scale_ + log_norm - fading * remaining));
    return static_cast<int>(std::clamp(bits, double(rule_.least), double(rule_.most)));
  }

  const Forecast f = forecast(step, log_norm);
  const PricedWidths widths(rule_.least, rule_.most);
  const double later = remaining - 1, here = f.here - fading * remaining, next = f.next - fading * later,
               rise = f.slope + fading;
  const double used = static_cast<double>(spent_);
  const double left = std::floor(rule_.budget * static_cast<double>(end) + 1e-9) - used;
  const auto [bottom, top] = std::minmax({here, next, next + rise * later});
  double low = 2 * bottom - 80, high = 2 * top + 80;
  for (int i = 0; i < 60 && high - low > 1e-6; ++i) {
    const double price = (low + high) / 2;
    const double total = widths.one(here, price) + widths.expected(next, rise, later, f.spread, price);
    (total > left ? low : high) = price;
  }
  double limit = left - rule_.least * later;
  if (!known) limit = std::floor(rule_.budget * static_cast<double>(step + 1) + 1e-9) - used;
  const double wanted = later > 0 ? widths.one(here, high) : left;
  return static_cast<int>(std::clamp(std::min(wanted, limit), double(rule_.least), double(rule_.most)));
}

void BitController::spent(int bits) {
  spent_ += static_cast<uint64_t>(std::max(bits, 0));
  ++told_;
}

double BitController::mean_bits() const { return told_ ? static_cast<double>(spent_) / static_cast<double>(told_) : 0; }

// Moves the origin of x to this step, lets the older points fade, adds this one.
void BitController::learn(uint64_t step, double log_norm) {
  auto& [w, x, y, xx, xy, yy] = sums_;
  bool burst_over = false;  // less than half of the level: what came before is no measure any more
  if (learned_) {
    const Forecast f = forecast(step, log_norm);
    const double miss = log_norm - (f.next - f.slope);
    burst_over = !rule_.convex && miss < -1;
    scatter_ += kForget * (std::min(miss * miss, kMostScatter) - scatter_);
    recent_ += kForgetRecent * (log_norm - recent_);
  } else {
    recent_ = log_norm;
  }
  const double gap = static_cast<double>(step + 1 - learned_);
  xx += gap * (gap * w - 2 * x);
  xy -= gap * y;
  x -= gap * w;
  double keep = learned_ ? std::pow(memory_, gap) : 0;
  if (burst_over) keep *= kForgetBurst;
  for (double& sum : sums_) sum *= keep;
  w += 1;
  y += log_norm;
  yy += log_norm * log_norm;
  learned_ = step + 1;
}

// Convex: a Bayesian line. Before there is scatter to measure, two steps' worth of an ordinary one stand in for it, so
// that the first few norms do not decide alone.
double BitController::slope() const {
  const auto& [w, x, y, xx, xy, yy] = sums_;
  const double run = static_cast<double>(rule_.steps ? rule_.steps : kRollingHorizon);
  if (!rule_.convex || !rule_.steps) return rule_.steps ? -std::log2(rule_.fall) / run : 0;
  const double prior = std::log2(rule_.alpha) / 2;
  const double sxx = xx - x * x / w, sxy = xy - x * y / w, syy = yy - y * y / w;
  if (sxx < 0.5) return prior;
  const double scatter = (std::max(0.0, syy - sxy * sxy / sxx) + 2 * kPriorScatter) / (w + 1);
  const double spread = std::max(kPriorSpread / run, -prior), trust = scatter / (spread * spread);
  return (sxy + trust * prior) / (sxx + trust);
}

// Non-convex: the average that stands for the level is as old as the steps it was taken from. Where norms fall all the
// time, it lies above the present ones, and steps would save bits for later ones that need them less. So the line
// through the last steps says where the level is now. It is not followed into the future, and not further than a run
// that falls a thousandfold: a burst is no trend.
double BitController::trend() const {
  const auto& [w, x, y, xx, xy, yy] = sums_;
  const double sxx = xx - x * x / w, sxy = xy - x * y / w;
  const double run = static_cast<double>(rule_.steps ? rule_.steps : kRollingHorizon), most = 10 / run;
  const double told = rule_.steps ? -std::log2(rule_.fall) / run : 0;
  if (sxx < 0.5) return told;
  const double trust = scatter_ / (most * most);
  return std::clamp((sxy + trust * told) / (sxx + trust), told - most, told + most);
}

BitController::Forecast BitController::forecast(uint64_t step, double log_norm) const {
  const double tilt = slope(), fit = rule_.convex && rule_.steps ? tilt : trend();
  const double level = (sums_[2] - fit * sums_[1]) / sums_[0];  // of the last step learned
  const double ahead = static_cast<double>(step) - static_cast<double>(learned_ - 1);
  return {.here = rule_.lagged ? recent_ + tilt : log_norm,
          .next = level + (ahead + 1) * tilt,
          .slope = tilt,
          .spread = std::sqrt(std::max(scatter_, kLeastScatter))};
}

std::vector<uint64_t> BitController::save() const {
  std::vector<uint64_t> state{spent_, told_, learned_};
  for (double sum : sums_) state.push_back(std::bit_cast<uint64_t>(sum));
  state.push_back(std::bit_cast<uint64_t>(recent_));
  state.push_back(std::bit_cast<uint64_t>(scatter_));
  return state;
}

void BitController::restore(std::span<const uint64_t> state) {
  if (state.size() != kStateWords) {
    throw Error(ErrorKind::frame,
                "bits state has " + std::to_string(state.size()) + " words, expected " + std::to_string(kStateWords),
                "bits");
  }
  for (size_t i = 3; i < state.size(); ++i) {
    if (!std::isfinite(std::bit_cast<double>(state[i]))) {
      throw Error(ErrorKind::frame, "bits state word " + std::to_string(i) + " is not finite, expected a sum", "bits");
    }
  }
  spent_ = state[0];
  told_ = state[1];
  learned_ = state[2];
  for (size_t i = 0; i < std::size(sums_); ++i) sums_[i] = std::bit_cast<double>(state[i + 3]);
  recent_ = std::bit_cast<double>(state[9]);
  scatter_ = std::clamp(std::bit_cast<double>(state[10]), 0.0, kMostScatter);
}

}  // namespace gradwire
