// SPDX-License-Identifier: Apache-2.0
// Tables of functions, one per vector target. A file that is compiled once per target (targets.h) has a function in the
// namespace of each, such as N_AVX2::make_topk_kernels(), which makes the table of that target:
//
//   static const auto all = target_tables<TopkKernels>({GW_EACH_TARGET(make_topk_kernels)}, {the reference loop's});
//   return table_of_target(all, kernels);
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "codec/targets.h"
#include "device/kernels.h"
#include "hwy/targets.h"

// {bit, function} of every vector target that this compiler builds, best first.
#define GW_EACH_TARGET(make) GW_AVX3(make) GW_AVX2(make) GW_SSE4(make) GW_NEON(make)
#if HWY_TARGETS & HWY_AVX3
#define GW_AVX3(make) {HWY_AVX3, N_AVX3::make},
#else
#define GW_AVX3(make)
#endif
#if HWY_TARGETS & HWY_AVX2
#define GW_AVX2(make) {HWY_AVX2, N_AVX2::make},
#else
#define GW_AVX2(make)
#endif
#if HWY_TARGETS & HWY_SSE4
#define GW_SSE4(make) {HWY_SSE4, N_SSE4::make},
#else
#define GW_SSE4(make)
#endif
#if HWY_TARGETS & HWY_NEON
#define GW_NEON(make) {HWY_NEON, N_NEON::make},
#else
#define GW_NEON(make)
#endif

namespace gradwire {

template <class Table>
struct TargetTable {
  int64_t target;  // Highway's bit
  Table (*make)();
};

// `first`, and behind it the tables of the targets that this processor runs.
template <class Table>
std::vector<Table> target_tables(std::initializer_list<TargetTable<Table>> targets, std::vector<Table> first = {}) {
  const int64_t usable = hwy::SupportedTargets();
  for (const TargetTable<Table>& one : targets)
    if (usable & one.target) first.push_back(one.make());
  return first;
}

// The table of the target of `kernels`. The first of `all` is the reference loop's.
template <class Table>
const Table& table_of_target(const std::vector<Table>& all, const Kernels& kernels) {
  for (const Table& table : all)
    if (std::strcmp(table.name, kernels.name) == 0) return table;
  return all.front();
}

}  // namespace gradwire
