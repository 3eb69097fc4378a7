// SPDX-License-Identifier: Apache-2.0
// The reference loop: the same bodies and the same driver, one element at a time.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "codec/body.h"
#include "codec/stats.h"
#include "core/random.h"
#include "device/kernels.h"
#include "device/lane.h"

namespace gradwire {
namespace {

#define GW_BODY inline
#define GW_DISPATCH inline
#define GW_LANE ScalarLane
#define GW_ELEMENT_a(name) GW_COMPILE_ELEMENT(name)
#define GW_ELEMENT_b(name) GW_COMPILE_ELEMENT(name)
// Each of these needs the ones before it.
// clang-format off
#include "codec/bodies.def"
#include "device/cpu_driver-inl.h"
#include "codec/instantiate/cpu_elements-inl.h"
#include "codec/instantiate/cpu_table-inl.h"
// clang-format on

// What a body says about scales does not depend on the target: one copy serves all of them.
template <class B>
uint64_t first_invalid(const Scheme& s, const uint32_t* scales, uint64_t units) {
  for (uint64_t unit = 0; unit < units; ++unit)
    if (!B::scales_valid(s, scales + unit * s.scale_words)) return unit;
  return units;
}
template <class B>
constexpr ScaleOps kScaleOps{B::make_scales, first_invalid<B>, B::make_params};

struct ScaleCall {
  template <class B>
  const ScaleOps* run() {
    return &kScaleOps<B>;
  }
};

}  // namespace

const ScaleOps& scale_ops(const Scheme& s) {
  ScaleCall call;
  switch (s.body) {
#define GW_ELEMENT(name, group) \
  case Body::name:              \
    return *with_##name(s, call);
#include "codec/bodies.def"
#undef GW_ELEMENT
    case Body::own:
      break;
  }
  refuse_body(s);
}

const Kernels& scalar_kernels() {
  static const Kernels kernels = KernelTable<ScalarLane>::kernels("scalar");
  return kernels;
}

}  // namespace gradwire
