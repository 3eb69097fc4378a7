// SPDX-License-Identifier: Apache-2.0
// The widths in terms of exponents: with e = log2(s_n), the width is h(e) = log2(2^e + 1) + 1, clamped. In the budget
// form a common shift of all exponents, log2 of k or t, is bisected.
#include "codec/dqsgd/budget.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <string>

#include "gradwire/error.h"

namespace gradwire {
namespace {

constexpr double kPriorFall = 4.3;     // log2 of how far norms are thought to fall over a run ...
constexpr double kPriorSpread = 6.64;  // ... and how far off that may be
constexpr double kPriorScatter = 0.1;  // the variance of log2 of the norm about its line

void require(bool fine, const char* field, double value, const char* allowed) {
  if (!fine) {
    throw Error(ErrorKind::usage, fmt::format("{} is {}; expected {}", field, value, allowed), field);
  }
}

double width(double e) { return (e > 60 ? e : std::log2(std::exp2(e) + 1)) + 1; }
double exponent(double bits) { return std::log2(std::exp2(bits - 1) - 1); }

// The clamped widths of `count` steps whose exponents are first, first + slope, ...: term by term if they are few; else
// the integral over the steps' unit intervals, which is a stretch at either clamp and, between, a smooth piece for
// Gauss-Legendre (8 points).
struct Clamped {
  double least, most, low, high;  // widths, and the exponents that reach them

  double one(double e) const { return std::clamp(width(e), least, most); }

  double sum(double first, double slope, double count) const {
    double total = 0;
    if (count <= 8) {
      for (double j = 0; j < count; ++j) total += one(first + slope * j);
      return total;
    }
    const double begin = first - slope / 2, end = begin + slope * count;
    if (std::abs(end - begin) < 1e-6) return one(first) * count;
    const double a = std::clamp(std::min(begin, end), low, high), b = std::clamp(std::max(begin, end), low, high);
    const double below = std::max(0.0, low - std::min(begin, end)) - std::max(0.0, low - std::max(begin, end));
    const double above = std::max(0.0, std::max(begin, end) - high) - std::max(0.0, std::min(begin, end) - high);
    static constexpr double kNode[4] = {.1834346424956498, .5255324099163290, .7966664774136267, .9602898564975363};
    static constexpr double kWeight[4] = {.3626837833783620, .3137066458778873, .2223810344533745, .1012285362903763};
    const double half = (b - a) / 2, middle = (a + b) / 2;
    for (int i = 0; i < 4; ++i)
      total += kWeight[i] * (width(middle - half * kNode[i]) + width(middle + half * kNode[i]));
    return (total * half + below * least + above * most) / std::abs(slope);
  }
};

}  // namespace

BitController::BitController(const BitRule& rule) : rule_(rule) {
  require(rule.least >= 2 && rule.least <= rule.most, "min", rule.least, "2 or more and no more than max");
  require(rule.most <= 32, "max", rule.most, "32 or less");
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
  const double length = static_cast<double>(rule.steps ? rule.steps : kRollingHorizon);
  memory_ = 1 - 1 / std::max(10.0, length / 20);
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
  const double here = log_norm - fading * remaining;
  if (rule_.form == BitRule::Form::error) {
    return static_cast<int>(std::clamp(std::ceil(width(scale_ + here)), double(rule_.least), double(rule_.most)));
  }

  const Clamped clamped{double(rule_.least), double(rule_.most), exponent(rule_.least), exponent(rule_.most)};
  const double tilt = slope(), later = remaining - 1;
  const double level = (sums_[2] - tilt * sums_[1]) / sums_[0] - static_cast<double>(learned_ - 1 - step) * tilt;
  const double next = level + tilt - fading * later, rise = tilt + fading;
  const double used = static_cast<double>(spent_);
  const double left = std::floor(rule_.budget * static_cast<double>(end) + 1e-9) - used;

  double low = -128, high = 128;
  low -= std::max(here, std::max(next, next + rise * later));
  high -= std::min(here, std::min(next, next + rise * later));
  for (int i = 0; i < 48 && high - low > 1e-6; ++i) {
    const double middle = (low + high) / 2;
    const bool over = clamped.one(middle + here) + clamped.sum(middle + next, rise, later) > left;
    (over ? high : low) = middle;
  }
  double limit = left - clamped.least * later;
  if (!known) limit = std::floor(rule_.budget * static_cast<double>(step + 1) + 1e-9) - used;
  const double wanted = later > 0 ? std::round(clamped.one((low + high) / 2 + here)) : left;
  return static_cast<int>(std::clamp(std::min(wanted, limit), clamped.least, clamped.most));
}

void BitController::spent(int bits) {
  spent_ += static_cast<uint64_t>(std::max(bits, 0));
  ++told_;
}

double BitController::mean_bits() const { return told_ ? static_cast<double>(spent_) / static_cast<double>(told_) : 0; }

// Moves the origin of x to this step, lets the older points fade, adds this one.
void BitController::learn(uint64_t step, double log_norm) {
  auto& [w, x, y, xx, xy, yy] = sums_;
  const double gap = static_cast<double>(step + 1 - learned_);
  xx += gap * (gap * w - 2 * x);
  xy -= gap * y;
  x -= gap * w;
  const double keep = learned_ ? std::pow(memory_, gap) : 0;
  for (double& sum : sums_) sum *= keep;
  w += 1;
  y += log_norm;
  yy += log_norm * log_norm;
  learned_ = step + 1;
}

// A Bayesian line: before there is scatter to measure, two steps' worth of an ordinary one stand in for it, so that the
// first few norms do not decide alone.
double BitController::slope() const {
  const auto& [w, x, y, xx, xy, yy] = sums_;
  const double run = static_cast<double>(rule_.steps ? rule_.steps : kRollingHorizon);
  const double prior = rule_.convex && rule_.steps ? std::log2(rule_.alpha) / 2 : -kPriorFall / run;
  const double sxx = xx - x * x / w, sxy = xy - x * y / w, syy = yy - y * y / w;
  if (sxx < 0.5) return prior;
  const double scatter = (std::max(0.0, syy - sxy * sxy / sxx) + 2 * kPriorScatter) / (w + 1);
  const double spread = std::max(kPriorSpread / run, -prior), trust = scatter / (spread * spread);
  return (sxy + trust * prior) / (sxx + trust);
}

std::vector<uint64_t> BitController::save() const {
  std::vector<uint64_t> state{spent_, told_, learned_};
  for (double sum : sums_) state.push_back(std::bit_cast<uint64_t>(sum));
  return state;
}

void BitController::restore(std::span<const uint64_t> state) {
  if (state.size() != 3 + std::size(sums_)) {
    throw Error(
        ErrorKind::frame,
        "bits state has " + std::to_string(state.size()) + " words, expected " + std::to_string(3 + std::size(sums_)),
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
}

}  // namespace gradwire
