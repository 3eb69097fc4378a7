// SPDX-License-Identifier: Apache-2.0
// topk's choice among the values of a tile and the levels of what it chose, compiled once per vector target and once
// as the reference loop.
#include <algorithm>
#include <cmath>
#include <functional>

#include "codec/target_table.h"
#include "codec/topk/kernels.h"
#include "codec/topk/level_fit.h"
#include "device/lane.h"
#include "device/params.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/topk/cpu_kernels.cc"
#include "codec/targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
#undef GW_BODY
#define GW_BODY HWY_INLINE
// Each of these needs the ones before it.
// clang-format off
#include "device/hwy_lane-inl.h"
HWY_INLINE VectorLane::F square_root(VectorLane::F x) { return hn::Sqrt(x); }
#include "codec/topk/levels-inl.h"
#include "codec/topk/lanes-inl.h"
// clang-format on

}  // namespace

TopkKernels make_topk_kernels() { return TopkLanes<VectorLane>::kernels(hwy::TargetName(HWY_TARGET)); }

}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();
#endif

#if HWY_ONCE
namespace gradwire {
namespace {

#undef GW_BODY
#define GW_BODY inline
// Each of these needs the ones before it.
// clang-format off
GW_BODY float square_root(float x) { return std::sqrt(x); }
#include "codec/topk/levels-inl.h"
#include "codec/topk/lanes-inl.h"
// clang-format on

}  // namespace

const TopkKernels& topk_kernels(const Kernels& kernels) {
  static const std::vector<TopkKernels> all =
      target_tables<TopkKernels>({GW_EACH_TARGET(make_topk_kernels)}, {TopkLanes<ScalarLane>::kernels("scalar")});
  return table_of_target(all, kernels);
}

}  // namespace gradwire
#endif  // HWY_ONCE
