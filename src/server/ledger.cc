// SPDX-License-Identifier: Apache-2.0
#include "server/ledger.h"

#include <algorithm>
#include <cmath>

#include "core/bits.h"

namespace gradwire::server {
namespace {

constexpr size_t kRow = 1024;

// Signs of the elements of a row, as sign bits; every row then has a sign of its own, which makes them unlike each
// other.
struct Signs {
  uint32_t bit[kRow];
  Signs() {
    for (uint32_t i = 0; i < kRow; ++i) bit[i] = mix32(i + 1) & 0x80000000u;
  }
};

}  // namespace

double signed_sum(std::span<const float> values, uint64_t name_hash, uint64_t first) {
  static const Signs signs;
  double sum = 0;
  for (size_t begin = 0; begin < values.size(); begin += kRow) {
    const size_t count = std::min(kRow, values.size() - begin), whole = count / 8 * 8;
    const float* x = values.data() + begin;
    // Eight running sums: vectors can hold them, and the result does not depend on whether they do.
    double sums[8] = {};
    for (size_t i = 0; i < whole; i += 8)
      for (size_t lane = 0; lane < 8; ++lane)
        sums[lane] += static_cast<double>(bits_float(float_bits(x[i + lane]) ^ signs.bit[i + lane]));
    for (size_t i = whole; i < count; ++i)
      sums[i - whole] += static_cast<double>(bits_float(float_bits(x[i]) ^ signs.bit[i]));
    const double row = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    sum += mix64(name_hash ^ mix64((first + begin) / kRow)) >> 63 ? -row : row;
  }
  return sum;
}

double square_sum(std::span<const float> values) {
  double sums[8] = {};
  const size_t whole = values.size() / 8 * 8;
  for (size_t i = 0; i < whole; i += 8)
    for (size_t lane = 0; lane < 8; ++lane) sums[lane] += static_cast<double>(values[i + lane]) * values[i + lane];
  for (size_t i = whole; i < values.size(); ++i) sums[i - whole] += static_cast<double>(values[i]) * values[i];
  double sum = 0;
  for (double one : sums) sum += one;
  return sum;
}

double Ledger::magnitude() const { return std::fmax(std::sqrt(squares), std::fabs(computed)); }

double Ledger::relative() const {
  return magnitude() > 0 ? std::fabs(difference()) / magnitude() : std::fabs(difference()) > 0 ? 1 : 0;
}

}  // namespace gradwire::server
