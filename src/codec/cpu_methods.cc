// SPDX-License-Identifier: Apache-2.0
// The bodies of methods-inl.h on Highway vectors, a file beside cpu_vector.cc so that the two compile side by side. What it
// offers to that file is one pair of functions per target.
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <utility>

#include "codec/rangefloat/range_float.h"
#include "core/random.h"
#include "device/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/cpu_methods.cc"
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
#undef GW_DISPATCH
#define GW_DISPATCH HWY_INLINE
// Each of these needs the ones before it.
// clang-format off
#include "device/hwy_lane-inl.h"
#include "codec/rangefloat/range_float-inl.h"
#include "codec/methods-inl.h"
#include "device/cpu_driver-inl.h"
// clang-format on

}  // namespace

void encode_methods(const Span& span, const UnitParams* whole, Scratch& scratch, LaneSums& check) {
  EncodeCall<VectorLane> call{span, whole, scratch, check};
  with_method(*span.scheme, call);
}
bool decode_methods(const Span& span, const UnitParams* whole, Scratch& scratch) {
  DecodeCall<VectorLane> call{span, whole, scratch};
  return with_method(*span.scheme, call);
}

}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();
#endif
