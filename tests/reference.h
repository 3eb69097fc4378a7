// SPDX-License-Identifier: Apache-2.0
// The methods as their papers state them, in double precision, written to be read. Nothing is shared with the library
// but the list of codecs: what a codec must return is worked out here from the values of a unit alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "gradwire/codec.h"

namespace gradwire::test {

struct Expectation {
  bool exact = false;            // `value` is the answer, up to `slack`
  std::vector<double> value;     // exact: the decoded values; random: unused
  double step = 0;               // random: distance between levels; the answer is one of the two levels around the value
  double clip = HUGE_VAL;        // random: values beyond are clipped first
  double slack = 0;              // what single precision may add
};

inline double largest(const std::vector<double>& x) {
  double top = 0;
  for (double v : x) top = std::max(top, std::fabs(v));
  return top;
}

// What decoding one unit may give.
inline Expectation expect(const Codec& codec, const std::vector<double>& x) {
  Expectation e;
  const double top = largest(x), n = static_cast<double>(x.size());
  const std::string& name = codec.name();
  if (name == "fp32") {
    e.exact = true;
    e.value = x;
  } else if (name == "fp16" || name == "bf16") {
    e.exact = true;
    for (double v : x) {
      const int digits = name == "fp16" ? 11 : 8, least = name == "fp16" ? -24 : -133;
      int exponent = 0;
      std::frexp(v, &exponent);
      const double quantum = std::ldexp(1.0, std::max(exponent - digits, least));
      e.value.push_back(v == 0 ? v : std::nearbyint(v / quantum) * quantum);  // nearest even, like the formats
    }
  } else if (name == "qsgd") {
    double norm = top;
    if (codec.get("norm") == "l2") {
      double squares = 0;
      for (double v : x) squares += v * v;
      norm = std::sqrt(squares);
    }
    e.step = norm / (std::ldexp(1.0, std::stoi(codec.get("bits")) - 1) - 1);
    // The library's l2 norm is summed on a grid of 2^-19 of the largest square: n terms, each off by half of that at most.
    if (codec.get("norm") == "l2") e.slack = norm * n * 0x1p-20;
    e.slack += 4e-7 * norm + 0x1p-149;
    if (codec.get("rounding") == "nearest") {
      e.exact = true;
      for (double v : x) e.value.push_back(e.step == 0 ? 0 : std::nearbyint(v / e.step) * e.step);
    }
  } else if (name == "terngrad") {
    const double clip = std::stod(codec.get("clip"));
    const double mean = std::accumulate(x.begin(), x.end(), 0.0) / n;
    double variance = 0;
    for (double v : x) variance += (v - mean) * (v - mean) / n;
    e.clip = clip > 0 && variance > 1e-9 * top * top ? clip * std::sqrt(variance) : HUGE_VAL;
    e.step = std::min(top, e.clip);
    e.slack = 1e-3 * e.step;  // the sums' grid: 2^-19 of the largest square, against a variance that may be small beside it
  } else if (name == "onebit") {
    double sum[2] = {0, 0}, count[2] = {0, 0};
    for (double v : x) {
      sum[v < 0] += v;
      count[v < 0] += 1;
    }
    e.exact = true;
    for (double v : x) e.value.push_back(sum[v < 0] / count[v < 0]);
    e.slack = top * 0x1p-18;  // each value is rounded to 2^-19 of the largest magnitude's power of two
  } else if (name == "topk") {
    std::vector<size_t> order(x.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return std::fabs(x[a]) > std::fabs(x[b]); });
    e.exact = true;
    e.value.assign(x.size(), 0);
    const size_t keep = std::max<size_t>(1, static_cast<size_t>(std::ceil(std::stod(codec.get("ratio")) * n)));
    for (size_t i = 0; i < std::min(keep, x.size()); ++i) e.value[order[i]] = x[order[i]];
  }
  return e;
}

}  // namespace gradwire::test
