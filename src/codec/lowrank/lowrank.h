// SPDX-License-Identifier: Apache-2.0
// lowrank: a matrix of n rows and m columns travels as two thin factors (after PowerSGD, Vogels et al., 2019, and
// ACP-SGD, 2023; docs/algorithms.md). It is no codec of messages: its factors are tensors that other codecs encode, and
// whoever reduces them computes the products.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace gradwire {

struct LowRank {
  uint32_t rank = 4;
  uint32_t bits = 8;       // of a number of a factor
  bool alternate = false;  // one factor a step, in turns

  static LowRank parse(std::string_view spec);  // "lowrank:rank=4,bits=8,alternate=off"; throws Error{usage}
  std::string str() const;
  // How factors are sent. They are rounded to nearest, since what that leaves out comes again. Short buckets keep the
  // strong rows of a factor apart from the weak ones.
  std::string factor_codec() const;
  bool lossless_factors() const { return bits == 32; }
  // Whether both factors exist and are less to send than the matrix itself.
  bool fits(uint64_t rows, uint64_t columns) const;
  // Whether a step sends the factor of the rows first. Without `alternate` it does, and the other one follows.
  bool sends_p(uint64_t step) const { return !alternate || step % 2 == 0; }
};

bool is_lowrank(std::string_view spec);

}  // namespace gradwire
