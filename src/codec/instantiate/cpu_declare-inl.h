// SPDX-License-Identifier: Apache-2.0
// The functions of cpu_elements-inl.h, whichever file compiles them. Included once per target, in its namespace.
#define GW_ELEMENT(name, group)                                                                     \
  void encode_##name(const Span& span, const UnitParams* whole, Scratch& scratch, LaneSums& check); \
  bool decode_##name(const Span& span, const UnitParams* whole, Scratch& scratch);
#include "codec/bodies.def"
#undef GW_ELEMENT
