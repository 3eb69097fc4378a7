// SPDX-License-Identifier: Apache-2.0
// The CPU driver with element bodies, for the lane GW_LANE. Included once per target, after the bodies and the driver;
// GW_ELEMENT_a and GW_ELEMENT_b say what becomes of the bodies of either group: GW_COMPILE_ELEMENT here, or nothing.

#define GW_COMPILE_ELEMENT(name)                                                                     \
  void encode_##name(const Span& span, const UnitParams* whole, Scratch& scratch, LaneSums& check) { \
    EncodeCall<GW_LANE> call{span, whole, scratch, check};                                           \
    with_##name(*span.scheme, call);                                                                 \
  }                                                                                                  \
  bool decode_##name(const Span& span, const UnitParams* whole, Scratch& scratch) {                  \
    DecodeCall<GW_LANE> call{span, whole, scratch};                                                  \
    return with_##name(*span.scheme, call);                                                          \
  }
#define GW_ELEMENT(name, group) GW_ELEMENT_##group(name)
#include "codec/bodies.def"
#undef GW_ELEMENT
#undef GW_COMPILE_ELEMENT
