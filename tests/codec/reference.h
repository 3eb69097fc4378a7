// SPDX-License-Identifier: Apache-2.0
// The methods as their papers state them, in double precision, written to be read. Nothing is shared with the library
// but the list of codecs: what a codec must return is worked out here from the values of a unit alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/codec.h"

namespace gradwire::test {

struct Expectation {
  bool exact = false;         // `value` is the answer, up to `slack`
  std::vector<double> value;  // exact: the decoded values; random: unused
  double step = 0;            // random: distance between levels; the answer is one of the two levels around the value
  double clip = HUGE_VAL;     // random: values beyond are clipped first
  double slack = 0;           // what single precision may add
  std::vector<double> grid;   // random, instead of step and clip: all levels, ascending
  bool ties = false;          // exact: from the middle between two values either may come out
  bool sum =
      false;  // `value` is the answer up to decisions at thresholds, where single precision may fall the other way:
              // the unit's squared error must be that of `value`, within two per cent

  // The levels around a value; at the ends both are the last one.
  std::pair<double, double> cell(double v) const {
    const auto above = std::lower_bound(grid.begin(), grid.end(), v);
    return {above == grid.begin() ? grid.front() : *std::prev(above), above == grid.end() ? grid.back() : *above};
  }
  // Distance between neighbouring levels where v is.
  double gap(double v) const { return grid.empty() ? step : cell(v).second - cell(v).first; }
  // How far `out` is from what element i, of value `in`, may become. 16 random bits: a value within 2^-15 of a level
  // may also go one level further.
  double miss(size_t i, double in, double out) const {
    if (sum) return 0;
    if (exact) return ties ? std::fabs(std::fabs(out - in) - std::fabs(value[i] - in)) : std::fabs(out - value[i]);
    if (grid.empty()) {
      const double clipped = std::clamp(in, -clip, clip);
      if (step == 0) return std::fabs(out);
      return std::max(std::fabs(out - clipped) - step * (1 + 0x1p-15),
                      std::fabs(out / step - std::nearbyint(out / step)) > 0.01 + 300 * slack / step ? HUGE_VAL : 0);
    }
    const auto [low, high] = cell(in);
    double best = std::min(std::fabs(out - low), std::fabs(out - high));
    if (std::min(std::fabs(in - low), std::fabs(in - high)) <= (high - low) * 0x1p-15 + slack)
      for (double level : grid) best = std::min(best, std::fabs(level - out));
    return best;
  }
};

inline double largest(const std::vector<double>& x) {
  double top = 0;
  for (double v : x) top = std::max(top, std::fabs(v));
  return top;
}

// Of an ascending grid.
inline double nearest_of(const std::vector<double>& grid, double v) {
  const auto above = std::lower_bound(grid.begin(), grid.end(), v);
  if (above == grid.begin()) return grid.front();
  if (above == grid.end()) return grid.back();
  return v - *std::prev(above) <= *above - v ? *std::prev(above) : *above;
}

// All values of a range float: the patterns of floats with a mantissa of m bits, from eps to max, zero, and their
// negatives.
inline std::vector<double> range_values(int m, double eps, int positive, int negative) {
  std::vector<double> values = {0};
  int exponent = 0;
  const double first = std::frexp(eps, &exponent) * 2;  // eps = first * 2^(exponent - 1), first in [1, 2)
  const int start = static_cast<int>(std::lround((first - 1) * std::ldexp(1.0, m)));
  for (int i = 0; i < std::max(positive, negative); ++i) {
    const int k = start + i, binade = k >> m, rest = k & ((1 << m) - 1);
    const double value = std::ldexp(1 + std::ldexp(static_cast<double>(rest), -m), exponent - 1 + binade);
    if (i < positive) values.push_back(value);
    if (i < negative) values.push_back(-value);
  }
  std::sort(values.begin(), values.end());
  return values;
}

// Cut to m bits of mantissa.
inline double cut(double v, int m) {
  int exponent = 0;
  const double f = std::frexp(v, &exponent);
  return std::ldexp(std::floor(f * std::ldexp(1.0, m + 1)), exponent - m - 1);
}

// CASQ: elements of a cluster share buckets, and a bucket has the mean of its elements.
inline std::vector<double> cluster_means(const Codec& codec, const std::vector<double>& x) {
  const uint32_t bits = static_cast<uint32_t>(std::stoi(codec.get("bits"))), clusters = 1u << bits, half = clusters / 2;
  const bool paper = codec.get("mode") == "paper";
  std::vector<double> thresholds;
  std::vector<uint32_t> words;
  if (codec.table().empty()) {
    for (uint32_t i = 1; i < clusters; ++i)
      thresholds.push_back(half == 1 ? 0 : 1.9 * (static_cast<double>(i) - half) / (half - 1));
    for (uint32_t j = 0; j < half; ++j) words.insert(words.end(), {clusters - 1 - j, j});
    if (paper)
      for (uint32_t k = 0; k < clusters; ++k)
        words[k] = half == 1 ? 32768 : k == 0 || k == clusters - 1 ? 32000 : 1536 / (clusters - 2);
  } else {
    for (uint32_t i = 0; i + 1 < clusters; ++i) {
      float t;
      std::memcpy(&t, &codec.table()[i], 4);
      thresholds.push_back(t);
    }
    words.assign(codec.table().begin() + (clusters - 1), codec.table().end());
  }
  double squares = 0;
  for (double v : x) squares += v * v;
  const double rms = std::sqrt(squares / static_cast<double>(x.size()));
  std::vector<uint32_t> of(x.size()), counts(clusters), buckets(clusters);
  for (size_t i = 0; i < x.size(); ++i)
    ++counts[of[i] = static_cast<uint32_t>(
                 std::count_if(thresholds.begin(), thresholds.end(), [&](double t) { return x[i] >= t * rms; }))];
  const uint64_t n = x.size(),
                 budget = std::clamp<uint64_t>(
                     static_cast<uint64_t>(std::ceil(std::stod(codec.get("budget")) * static_cast<double>(n))),
                     paper ? clusters : std::min<uint64_t>(n, clusters), std::max<uint64_t>(n, clusters));
  uint64_t left = budget;
  if (paper) {
    for (uint32_t k = 0; k < clusters; ++k)
      buckets[k] = 1 + static_cast<uint32_t>((budget - clusters) * words[k] / 65536);
  } else {
    for (uint32_t k = 0; k < clusters; ++k) left -= buckets[k] = counts[k] > 0;
    for (uint32_t k : words)
      if (counts[k]) {
        const uint32_t more = static_cast<uint32_t>(std::min<uint64_t>(counts[k] - 1, left));
        buckets[k] += more;
        left -= more;
      }
  }
  const auto bucket = [&](size_t i, uint32_t rank) -> uint64_t {
    if (!paper) return uint64_t{rank} * buckets[of[i]] / counts[of[i]];
    uint32_t h = 0;
    for (int b = 0; b < 4; ++b) h = h * 131 + static_cast<uint32_t>(static_cast<signed char>(i >> 8 * b & 255));
    return (h & 0x7fffffff) % buckets[of[i]];
  };
  std::vector<std::vector<double>> sum(clusters), load(clusters);
  for (uint32_t k = 0; k < clusters; ++k) sum[k].resize(buckets[k]), load[k].resize(buckets[k]);
  std::vector<uint32_t> rank(clusters);
  std::vector<uint64_t> place(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    place[i] = bucket(i, rank[of[i]]++);
    sum[of[i]][place[i]] += x[i];
    load[of[i]][place[i]] += 1;
  }
  std::vector<double> out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = sum[of[i]][place[i]] / load[of[i]][place[i]];
  return out;
}

inline void transform(std::vector<std::complex<double>>& z, double sign) {
  const size_t n = z.size();
  if (n == 1) return;
  std::vector<std::complex<double>> even, odd;
  for (size_t i = 0; i < n; i += 2) even.push_back(z[i]), odd.push_back(z[i + 1]);
  transform(even, sign);
  transform(odd, sign);
  for (size_t k = 0; k < n / 2; ++k) {
    const std::complex<double> t =
        std::polar(1.0, sign * 2 * M_PI * static_cast<double>(k) / static_cast<double>(n)) * odd[k];
    z[k] = even[k] + t;
    z[k + n / 2] = even[k] - t;
  }
}

// FFT sparsification: the strongest frequencies, their parts as range floats of the largest of them.
inline std::vector<double> strongest_frequencies(const Codec& codec, const std::vector<double>& x) {
  size_t size = 64;
  while (size < x.size()) size *= 2;
  std::vector<std::complex<double>> z(size);
  for (size_t i = 0; i < x.size(); ++i) z[i] = x[i];
  transform(z, -1);
  const size_t bins = size / 2;
  std::vector<std::pair<double, size_t>> order;  // bin 0 is the two real ones
  for (size_t j = 0; j < bins; ++j)
    order.emplace_back(j ? -2 * std::norm(z[j]) : -(std::norm(z[0]) + std::norm(z[bins])), j);
  std::sort(order.begin(), order.end());
  const double theta = std::stod(codec.get("theta"));
  const size_t kept =
      std::max<size_t>(1, static_cast<size_t>(std::floor((1 - theta) * static_cast<double>(bins) + 0.5)));
  std::vector<double> parts;
  for (size_t i = 0; i < kept; ++i) {
    const size_t j = order[i].second;
    parts.insert(parts.end(), {z[j].real(), j ? z[j].imag() : z[bins].real()});
  }
  const double top = largest(parts);
  if (top == 0) return std::vector<double>(x.size());
  if (codec.get("format") == "range") {
    const int bits = std::stoi(codec.get("bits")), half = 1 << (bits - 1);
    int m = std::stoi(codec.get("mantissa"));
    if (m == 0) m = std::max(1, bits - 4);
    const int base = 1 - half;  // patterns relative to that of 1
    const double eps = std::ldexp(1 + std::ldexp(static_cast<double>(base & ((1 << m) - 1)), -m), base >> m);
    const std::vector<double> grid = range_values(m, eps, half, half - 1);
    for (double& part : parts) {
      const double r = part / top;
      double q = std::clamp(r, grid.front(), grid.back());
      if (codec.get("mode") == "round")
        q = nearest_of(grid, q);
      else
        q = r >= 0 ? *std::prev(std::upper_bound(grid.begin(), grid.end(), q))
                   : *std::lower_bound(grid.begin(), grid.end(), q);
      part = q * top;
    }
  }
  std::fill(z.begin(), z.end(), 0);
  for (size_t i = 0; i < kept; ++i) {
    const size_t j = order[i].second;
    if (j == 0) {
      z[0] = parts[0 + 2 * i];
      z[bins] = parts[1 + 2 * i];
    } else {
      z[j] = {parts[2 * i], parts[2 * i + 1]};
      z[size - j] = std::conj(z[j]);
    }
  }
  transform(z, 1);
  std::vector<double> out;
  for (size_t i = 0; i < x.size(); ++i) out.push_back(z[i].real() / static_cast<double>(size));
  return out;
}

inline Expectation expect_fp32(const Codec&, const std::vector<double>& x) {
  Expectation e;
  e.exact = true;
  e.value = x;
  return e;
}

// A float with so many digits; 2^least is its smallest number.
template <int digits, int least>
inline Expectation expect_float(const Codec&, const std::vector<double>& x) {
  Expectation e;
  e.exact = true;
  for (double v : x) {
    int exponent = 0;
    std::frexp(v, &exponent);
    const double quantum = std::ldexp(1.0, std::max(exponent - digits, least));
    e.value.push_back(v == 0 ? v : std::nearbyint(v / quantum) * quantum);  // nearest even, like the formats
  }
  return e;
}

inline Expectation expect_qsgd(const Codec& codec, const std::vector<double>& x) {
  Expectation e;
  const double top = largest(x), n = static_cast<double>(x.size());
  double norm = top;
  if (codec.get("norm") == "l2") {
    double squares = 0;
    for (double v : x) squares += v * v;
    norm = std::sqrt(squares);
  }
  e.step = norm / (std::ldexp(1.0, std::stoi(codec.get("bits")) - 1) - 1);
  // The library's l2 norm is summed on a grid of 2^-19 of the largest square: n terms, each off by half of that at
  // most.
  if (codec.get("norm") == "l2") e.slack = norm * n * 0x1p-20;
  e.slack += 4e-7 * norm + 0x1p-149;
  if (codec.get("rounding") == "nearest") {
    e.exact = true;
    e.ties = true;
    for (double v : x) e.value.push_back(e.step == 0 ? 0 : std::nearbyint(v / e.step) * e.step);
  }
  return e;
}

inline Expectation expect_terngrad(const Codec& codec, const std::vector<double>& x) {
  Expectation e;
  const double top = largest(x), n = static_cast<double>(x.size());
  const double clip = std::stod(codec.get("clip"));
  const double mean = std::accumulate(x.begin(), x.end(), 0.0) / n;
  double variance = 0;
  for (double v : x) variance += (v - mean) * (v - mean) / n;
  e.clip = clip > 0 && variance > 1e-9 * top * top ? clip * std::sqrt(variance) : HUGE_VAL;
  e.step = std::min(top, e.clip);
  e.slack =
      1e-3 * e.step;  // the sums' grid: 2^-19 of the largest square, against a variance that may be small beside it
  return e;
}

inline Expectation expect_onebit(const Codec&, const std::vector<double>& x) {
  Expectation e;
  const double top = largest(x);
  double sum[2] = {0, 0}, count[2] = {0, 0};
  for (double v : x) {
    sum[v < 0] += v;
    count[v < 0] += 1;
  }
  e.exact = true;
  for (double v : x) e.value.push_back(sum[v < 0] / count[v < 0]);
  e.slack = top * 0x1p-18;  // each value is rounded to 2^-19 of the largest magnitude's power of two
  return e;
}

// Magnitudes on n levels low + rise * i^2, fitted in four rounds: to the nearest level, then least squares.
inline std::vector<double> on_levels(const std::vector<double>& magnitudes, int n) {
  const double count = static_cast<double>(magnitudes.size()),
               total = std::accumulate(magnitudes.begin(), magnitudes.end(), 0.0);
  const auto [least, most] = std::minmax_element(magnitudes.begin(), magnitudes.end());
  double low = n == 1 ? total / count : *least,
         rise = n == 1 ? 0 : (*most - *least) / (n == 2 ? 2 : std::pow(n - 1, 2));
  const auto nearest = [&](double v) {
    int best = 0;
    for (int i = 1; i < n; ++i)
      if (std::fabs(v - low - rise * i * i) < std::fabs(v - low - rise * best * best)) best = i;
    return static_cast<double>(best * best);
  };
  for (int round = 0; n > 1 && round < 4; ++round) {
    double squares = 0, fourths = 0, products = 0;
    for (const double v : magnitudes) {
      const double square = nearest(v);
      squares += square;
      fourths += square * square;
      products += square * v;
    }
    const double determinant = count * fourths - squares * squares;
    if (determinant <= 0) continue;
    rise = std::max((count * products - squares * total) / determinant, 0.0);
    low = std::max((total - rise * squares) / count, 0.0);
  }
  std::vector<double> out;
  for (const double v : magnitudes) out.push_back(low + rise * nearest(v));
  return out;
}

inline Expectation expect_topk(const Codec& codec, const std::vector<double>& x) {
  Expectation e;
  const double n = static_cast<double>(x.size());
  std::vector<size_t> order(x.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return std::fabs(x[a]) > std::fabs(x[b]); });
  e.exact = true;
  e.value.assign(x.size(), 0);
  const size_t keep = std::max<size_t>(1, static_cast<size_t>(std::ceil(std::stod(codec.get("ratio")) * n)));
  order.resize(std::min(keep, x.size()));
  const int bits = std::stoi(codec.get("bits"));
  if (bits > 8) {
    for (const size_t i : order) e.value[i] = bits == 32 ? x[i] : expect_float<8, -133>(codec, {x[i]}).value[0];
    return e;
  }
  std::vector<double> magnitudes;
  for (const size_t i : order) magnitudes.push_back(std::fabs(x[i]));
  const std::vector<double> levels = on_levels(magnitudes, 1 << (bits - 1));
  for (size_t j = 0; j < order.size(); ++j) e.value[order[j]] = std::copysign(levels[j], x[order[j]]);
  e.sum = true;  // a value in the middle between two levels may take either
  e.slack = 0x1p-18 * largest(x) + 0x1p-147;
  return e;
}

inline Expectation expect_optquant(const Codec& codec, const std::vector<double>& x) {
  Expectation e;
  const double top = largest(x);
  const int bits = std::stoi(codec.get("bits")), half = 1 << (bits - 1);
  std::vector<double> levels;
  for (uint32_t word : codec.table()) {
    float level;
    std::memcpy(&level, &word, 4);
    levels.push_back(level);
  }
  if (levels.empty())
    for (int i = -half; i < half; ++i)
      levels.push_back((i < 0 ? -1 : 1) * std::pow(((i < 0 ? -1 - i : i) + 0.5) / (half - 0.5), 2));
  for (double level : levels) e.grid.push_back(level * top);
  e.slack = (4e-7 + 0x1p-16) * top + 0x1p-149;  // cells are cut in 2^16 parts
  e.exact = codec.get("mode") == "biased" && codec.get("kappa") == "0.5";
  if (e.exact) {
    e.ties = true;
    for (double v : x) e.value.push_back(nearest_of(e.grid, v));
  }
  return e;
}

inline Expectation expect_dqsgd(const Codec& codec, const std::vector<double>& x) {
  Expectation e;
  const double top = largest(x), n = static_cast<double>(x.size());
  const int bits = codec.table().empty() ? std::clamp(static_cast<int>(std::lround(std::stod(codec.get("budget")))),
                                                      std::stoi(codec.get("min")), std::stoi(codec.get("max")))
                                         : static_cast<int>(codec.table()[0]);
  if (bits == 0) {
    e.exact = true;
    e.value.assign(x.size(), 0);
    return e;
  }
  double norm = top;
  if (codec.get("norm") == "l2") {
    double squares = 0;
    for (double v : x) squares += v * v;
    norm = std::min(std::sqrt(squares), 3.4028234663852886e38);
    e.slack = norm * n * 0x1p-20;
  }
  for (int i = -((1 << (bits - 1)) - 1); i < 1 << (bits - 1); ++i) e.grid.push_back(i * norm / ((1 << (bits - 1)) - 1));
  e.slack += 4e-7 * norm + 0x1p-149 + (bits > 8 ? norm / (1 << (bits - 1)) / 256 : 0);  // the wide grid is 2^-8 level
  return e;
}

inline Expectation expect_rangefloat(const Codec& codec, const std::vector<double>& x) {
  Expectation e;
  const double top = largest(x);
  const int bits = std::stoi(codec.get("bits")), half = 1 << (bits - 1);
  int m = std::stoi(codec.get("mantissa"));
  if (m == 0) m = codec.table().empty() ? std::max(1, bits - 4) : static_cast<int>(codec.table()[0]);
  const double given = std::stod(codec.get("max")), largest_value = cut(given > 0 ? given : top, m);
  e.exact = true;
  e.ties = true;
  if (largest_value == 0) {
    e.value.assign(x.size(), 0);
    return e;
  }
  int exponent = 0;
  const double fraction = std::frexp(largest_value, &exponent) * 2;
  const int top_pattern = static_cast<int>(std::lround((fraction - 1) * std::ldexp(1.0, m))) + (exponent << m);
  const auto pattern_value = [&](int p) {
    return std::ldexp(1 + std::ldexp(static_cast<double>(p & ((1 << m) - 1)), -m), (p >> m) - 1);
  };
  int base = top_pattern + 1 - half;
  const auto pattern_of = [&](double v) {
    int ex = 0;
    const double f = std::frexp(v, &ex) * 2;
    return static_cast<int>(std::floor((f - 1) * std::ldexp(1.0, m))) + (ex << m);
  };
  if (std::stod(codec.get("eps")) > 0) base = pattern_of(std::stod(codec.get("eps")));
  const int positive = top_pattern - base + 1;
  const double low = -std::stod(codec.get("min"));
  const int negative = std::min((low > 0 ? pattern_of(low) : top_pattern) - base + 1, 2 * half - 1 - positive);
  const std::vector<double> grid = range_values(m, pattern_value(base), positive, negative);
  for (double v : x) {
    const double bounded = std::clamp(v, grid.front(), grid.back());
    if (codec.get("mode") == "round") {
      e.value.push_back(nearest_of(grid, bounded));
    } else {
      auto at = std::upper_bound(grid.begin(), grid.end(), bounded);
      double value = v >= 0 ? *std::prev(at) : *std::lower_bound(grid.begin(), grid.end(), bounded);
      e.value.push_back(value);
    }
  }
  // Near the bottom of the floats mantissas are cut by the format itself.
  e.slack =
      1e-7 * largest_value + (pattern_value(base) < 0x1p-120 ? largest_value * std::ldexp(1.0, -m) + 0x1p-126 : 0);
  return e;
}

template <std::vector<double> (*method)(const Codec&, const std::vector<double>&)>
inline Expectation expect_method(const Codec& codec, const std::vector<double>& x) {
  Expectation e;
  const double top = largest(x);
  e.sum = true;
  e.value = method(codec, x);
  e.slack = 1e-3 * top;  // f16 means; sides of subnormal units
  return e;
}

inline Expectation expect_loggrid(const Codec& codec, const std::vector<double>& x) {
  Expectation e;
  const double top = largest(x);
  for (int j = 0; j <= std::stoi(codec.get("k")); ++j)
    e.grid.insert(e.grid.end(), {std::ldexp(top, -j), -std::ldexp(top, -j)});
  e.grid.push_back(0);
  std::sort(e.grid.begin(), e.grid.end());
  e.exact = true;
  e.ties = true;
  for (double v : x) e.value.push_back(nearest_of(e.grid, v));
  e.slack = 4e-7 * top + 0x1p-149;
  return e;
}

inline Expectation expect_unigrid(const Codec& codec, const std::vector<double>& x) {
  Expectation e;
  const double top = largest(x);
  const double range = std::stod(codec.get("range")), limit = range > 0 ? range : top,
               step = limit / ((1 << (std::stoi(codec.get("bits")) - 1)) - 1);
  e.exact = true;
  e.ties = true;
  for (double v : x) e.value.push_back(step == 0 ? 0 : std::nearbyint(std::clamp(v, -limit, limit) / step) * step);
  e.slack = 2e-7 * limit + 0x1p-149;
  return e;
}

inline Expectation expect_nuqsgd(const Codec& codec, const std::vector<double>& x) {
  Expectation e;
  double norm = largest(x);
  if (codec.get("norm") == "l2") {
    double squares = 0;
    for (double v : x) squares += v * v;
    norm = std::min(std::sqrt(squares), 3.4028234663852886e38);  // what f32 can hold
    e.slack = norm * static_cast<double>(x.size()) * 0x1p-20;    // as with qsgd
  }
  e.grid.push_back(0);
  for (int i = 0; i < (1 << (std::stoi(codec.get("bits")) - 1)) - 1; ++i)
    e.grid.insert(e.grid.end(), {std::ldexp(norm, -i), -std::ldexp(norm, -i)});
  std::sort(e.grid.begin(), e.grid.end());
  e.slack += 4e-7 * norm + 0x1p-149;
  if (codec.get("rounding") == "nearest") {
    e.exact = true;
    e.ties = true;
    for (double v : x) e.value.push_back(nearest_of(e.grid, v));
  }
  return e;
}

// What decoding one unit may give, by the name of the codec.
using Reference = Expectation (*)(const Codec&, const std::vector<double>&);
inline const std::map<std::string, Reference>& references() {
  static const std::map<std::string, Reference> all = {
      {"fp32", expect_fp32},
      {"fp16", expect_float<11, -24>},
      {"bf16", expect_float<8, -133>},
      {"qsgd", expect_qsgd},
      {"terngrad", expect_terngrad},
      {"onebit", expect_onebit},
      {"topk", expect_topk},
      {"optquant", expect_optquant},
      {"dqsgd", expect_dqsgd},
      {"rangefloat", expect_rangefloat},
      {"casq", expect_method<cluster_means>},
      {"fft", expect_method<strongest_frequencies>},
      {"loggrid", expect_loggrid},
      {"unigrid", expect_unigrid},
      {"nuqsgd", expect_nuqsgd},
  };
  return all;
}

inline Expectation expect(const Codec& codec, const std::vector<double>& x) {
  const auto found = references().find(codec.name());
  if (found == references().end())
    throw std::logic_error("tests/codec/reference.h has no reference for " + codec.name());
  return found->second(codec, x);
}

}  // namespace gradwire::test
