// SPDX-License-Identifier: Apache-2.0
#include "server/ledger.h"

#include <cmath>

#include "core/bits.h"

namespace gradwire::server {

double signed_sum(std::span<const float> values, uint64_t name_hash, uint64_t first) {
  // Eight running sums: vectors can hold them, and the result does not depend on whether they do.
  double sums[8] = {};
  const uint32_t salt = mix32(static_cast<uint32_t>(mix64(name_hash ^ first)));
  const size_t whole = values.size() / 8 * 8;
  for (size_t i = 0; i < whole; i += 8)
    for (size_t lane = 0; lane < 8; ++lane) {
      // A sign bit from the middle of a product: cheap, and unlike anything a gradient does.
      uint32_t mixed = (static_cast<uint32_t>(i + lane) ^ salt) * 0x9e3779b1u;
      mixed ^= mixed >> 15;
      mixed *= 0x85ebca77u;
      sums[lane] += static_cast<double>(bits_float(float_bits(values[i + lane]) ^ (mixed & 0x80000000u)));
    }
  for (size_t i = whole; i < values.size(); ++i) {
    uint32_t mixed = (static_cast<uint32_t>(i) ^ salt) * 0x9e3779b1u;
    mixed ^= mixed >> 15;
    mixed *= 0x85ebca77u;
    sums[i - whole] += static_cast<double>(bits_float(float_bits(values[i]) ^ (mixed & 0x80000000u)));
  }
  double sum = 0;
  for (double one : sums) sum += one;
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
