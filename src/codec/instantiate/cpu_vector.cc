// SPDX-License-Identifier: Apache-2.0
// The driver and the element bodies of group a on Highway vectors, and the tables of functions with all bodies. This
// file is compiled once per target that the compiler knows; the processor's own capabilities decide at run time which
// tables may be used.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "codec/body.h"
#include "codec/stats.h"
#include "codec/target_table.h"
#include "core/random.h"
#include "device/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/instantiate/cpu_vector.cc"
#include "codec/targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// Highway also visits a target without vectors; cpu_scalar.cc is our loop for that.
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
#include "codec/instantiate/cpu_table-inl.h"
// clang-format on

}  // namespace

#undef GW_LANE
#define GW_LANE VectorLane
#undef GW_ELEMENT_a
#define GW_ELEMENT_a(name) GW_COMPILE_ELEMENT(name)
#undef GW_ELEMENT_b
#define GW_ELEMENT_b(name)
#include "codec/instantiate/cpu_elements-inl.h"

Kernels make_kernels() { return KernelTable<VectorLane>::kernels(hwy::TargetName(HWY_TARGET)); }

}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();
#endif

#if HWY_ONCE
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "gradwire/error.h"
#include "gradwire/runner.h"

namespace gradwire {

const std::vector<const Kernels*>& vector_kernels() {
  static const std::vector<Kernels> all = target_tables<Kernels>({GW_EACH_TARGET(make_kernels)});
  static const std::vector<const Kernels*> pointers = [] {
    std::vector<const Kernels*> out;
    for (const Kernels& table : all) out.push_back(&table);
    return out;
  }();
  return pointers;
}

std::vector<std::string> simd_targets() {
  std::vector<std::string> names;
  for (const Kernels* table : vector_kernels()) names.emplace_back(table->name);
  return names;
}

const Kernels& kernels_named(const std::string& simd) {
  if (simd == "scalar" || (simd.empty() && vector_kernels().empty())) return scalar_kernels();
  if (simd.empty()) return *vector_kernels().front();
  for (const Kernels* table : vector_kernels())
    if (simd == table->name) return *table;
  throw Error(ErrorKind::usage,
              fmt::format("simd is '{}'; allowed here are scalar, {}", simd, fmt::join(simd_targets(), ", ")), "simd");
}

}  // namespace gradwire
#endif  // HWY_ONCE
