// SPDX-License-Identifier: Apache-2.0
// The element bodies of group b on Highway vectors, a file beside cpu_vector.cc so that the two compile side by side.
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <utility>

#include "codec/body.h"
#include "codec/stats.h"
#include "core/random.h"
#include "device/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/instantiate/cpu_vector_b.cc"
#include "codec/targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {

#include "codec/instantiate/cpu_declare-inl.h"

namespace {

namespace hn = hwy::HWY_NAMESPACE;
#undef GW_BODY
#define GW_BODY HWY_INLINE
#undef GW_DISPATCH
#define GW_DISPATCH HWY_INLINE
// Each of these needs the ones before it.
// clang-format off
#include "device/hwy_lane-inl.h"
#include "codec/bodies.def"
#include "device/cpu_driver-inl.h"
// clang-format on

}  // namespace

#undef GW_LANE
#define GW_LANE VectorLane
#undef GW_ELEMENT_a
#define GW_ELEMENT_a(name)
#undef GW_ELEMENT_b
#define GW_ELEMENT_b(name) GW_COMPILE_ELEMENT(name)
#include "codec/instantiate/cpu_elements-inl.h"

}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();
#endif
