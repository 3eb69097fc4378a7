// SPDX-License-Identifier: Apache-2.0
// lowrank's loops over a matrix, compiled once per vector target and once as the reference loop.
#include "codec/lowrank/kernels.h"
#include "codec/target_table.h"
#include "device/lane.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/lowrank/cpu_kernels.cc"
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
#undef GW_LAMBDA
#define GW_LAMBDA HWY_ATTR
// Each of these needs the ones before it.
// clang-format off
#include "device/hwy_lane-inl.h"
#include "codec/lowrank/products-inl.h"
// clang-format on

}  // namespace

LowRankKernels make_lowrank_kernels() { return LowRankProducts<VectorLane>::kernels(hwy::TargetName(HWY_TARGET)); }

}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();
#endif

#if HWY_ONCE
namespace gradwire {
namespace {

#undef GW_BODY
#define GW_BODY inline
#undef GW_LAMBDA
#define GW_LAMBDA
#include "codec/lowrank/products-inl.h"

}  // namespace

std::span<const LowRankKernels> lowrank_kernels() {
  static const std::vector<LowRankKernels> all = target_tables<LowRankKernels>(
      {GW_EACH_TARGET(make_lowrank_kernels)}, {LowRankProducts<ScalarLane>::kernels("scalar")});
  return all;
}

}  // namespace gradwire
#endif  // HWY_ONCE
