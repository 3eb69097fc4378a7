// SPDX-License-Identifier: Apache-2.0
// Finding a codec's own table of functions for the vector target that a runner uses.
#pragma once

#include <cstring>
#include <vector>

#include "device/kernels.h"

namespace gradwire {

// The table of the target of `kernels`. The first of `all` is the reference loop's.
template <class Table>
const Table& table_of_target(const std::vector<Table>& all, const Kernels& kernels) {
  for (const Table& table : all)
    if (std::strcmp(table.name, kernels.name) == 0) return table;
  return all.front();
}

}  // namespace gradwire
