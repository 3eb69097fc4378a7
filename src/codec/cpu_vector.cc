// SPDX-License-Identifier: Apache-2.0
// The bodies and the driver on Highway vectors: this file is compiled once per target that the compiler knows, and the
// processor's own capabilities decide at run time which tables may be used.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/random.h"
#include "device/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/cpu_vector.cc"
#include "codec/targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// Highway also visits a target without vectors; cpu_scalar.cc is our loop for that.
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {

void encode_methods(const Span& span, const UnitParams* whole, Scratch& scratch, LaneSums& check);  // cpu_methods.cc
bool decode_methods(const Span& span, const UnitParams* whole, Scratch& scratch);

namespace {

namespace hn = hwy::HWY_NAMESPACE;
#undef GW_BODY
#define GW_BODY HWY_INLINE
#undef GW_DISPATCH
#define GW_DISPATCH HWY_INLINE
// Each of these needs the ones before it.
// clang-format off
#include "device/hwy_lane-inl.h"
#include "codec/bodies-inl.h"
#include "device/cpu_driver-inl.h"
#include "codec/cpu_table-inl.h"
// clang-format on

}  // namespace

Kernels make_kernels() { return Table<VectorLane>::kernels(hwy::TargetName(HWY_TARGET)); }

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
  static const std::vector<Kernels> all = [] {
    std::vector<Kernels> tables;
    const int64_t usable = hwy::SupportedTargets();
    (void)usable;
#define GW_TARGET(bit, space) \
  if (usable & (bit)) tables.push_back(space::make_kernels());
#include "codec/each_target-inl.h"
    return tables;
  }();
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
