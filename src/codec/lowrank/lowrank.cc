// SPDX-License-Identifier: Apache-2.0
#include "codec/lowrank/lowrank.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "codec/parameters.h"
#include "core/spec.h"

namespace gradwire {
namespace {

const std::vector<Parameter>& parameters() {
  static const std::vector<Parameter> all = {
      integer("rank", "4", 1, 64, "rows of a factor"),
      choice("bits", {"8", "4", "16", "32"}, "of a number of a factor"),
      choice("alternate", {"off", "on"}, "off: both factors in every step, in two exchanges; on: one, in turns")};
  return all;
}

}  // namespace

bool is_lowrank(std::string_view spec) { return name_of_spec(spec) == "lowrank"; }

LowRank LowRank::parse(std::string_view spec) {
  const Values values{parse_spec("codec", spec, parameters())};
  return {values.integer("rank"), values.integer("bits"), values.choice("alternate") == "on"};
}

std::string LowRank::str() const {
  return fmt::format("lowrank:rank={},bits={},alternate={}", rank, bits, alternate ? "on" : "off");
}

std::string LowRank::factor_codec() const {
  switch (bits) {
    case 4:
      return "qsgd:bits=4,bucket=64,rounding=nearest";
    case 8:
      return "qsgd:bits=8,bucket=128,rounding=nearest";
    case 16:
      return "bf16";
    default:
      return "fp32";
  }
}

bool LowRank::fits(uint64_t rows, uint64_t columns) const {
  if (rank > std::min(rows, columns)) return false;
  // In double, since the product of hostile extents has more than 64 bits. Where that matters, rounding does not.
  const double n = static_cast<double>(rows), m = static_cast<double>(columns);
  return rank * (n + m) * bits < 32 * n * m;
}

}  // namespace gradwire
