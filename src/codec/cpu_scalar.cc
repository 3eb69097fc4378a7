// SPDX-License-Identifier: Apache-2.0
// The reference loop: the same bodies and the same driver, one element at a time.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "codec/rangefloat/range_float.h"
#include "core/random.h"
#include "device/kernels.h"
#include "device/lane.h"

namespace gradwire {
namespace {

#define GW_BODY inline
#define GW_DISPATCH inline
// Each of these needs the ones before it.
// clang-format off
#include "codec/bodies-inl.h"
#include "codec/rangefloat/range_float-inl.h"
#include "codec/methods-inl.h"
#include "device/cpu_driver-inl.h"
// clang-format on

void encode_methods(const Span& span, const UnitParams* whole, Scratch& scratch, LaneSums& check) {
  EncodeCall<ScalarLane> call{span, whole, scratch, check};
  with_method(*span.scheme, call);
}
bool decode_methods(const Span& span, const UnitParams* whole, Scratch& scratch) {
  DecodeCall<ScalarLane> call{span, whole, scratch};
  return with_method(*span.scheme, call);
}
#include "codec/cpu_table-inl.h"

}  // namespace

const Kernels& scalar_kernels() {
  static const Kernels kernels = Table<ScalarLane>::kernels("scalar");
  return kernels;
}

}  // namespace gradwire
