// SPDX-License-Identifier: Apache-2.0
// The reference loop: the same bodies and the same driver, one element at a time.
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <utility>

#include "core/random.h"
#include "device/kernels.h"
#include "device/lane.h"
#include "device/sketch.h"

namespace gradwire {
namespace {

#define GW_BODY inline
#define GW_DISPATCH inline
#include "codec/bodies-inl.h"
#include "codec/methods-inl.h"
#include "device/cpu_driver-inl.h"
#include "device/cpu_select-inl.h"
#include "device/sketch_cpu-inl.h"

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
