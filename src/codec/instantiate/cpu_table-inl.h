// SPDX-License-Identifier: Apache-2.0
// The CPU driver with every element body, as one table of functions. Included once per target, like what it is made of.

template <class L>
struct KernelTable {
  static void encode(const Span& span, const UnitParams* whole, Scratch& scratch, LaneSums& check) {
    switch (span.scheme->body) {
#define GW_ELEMENT(name, group) \
  case Body::name:              \
    return encode_##name(span, whole, scratch, check);
#include "codec/bodies.def"
#undef GW_ELEMENT
      case Body::own:
        break;
    }
    refuse_body(*span.scheme);
  }
  static bool decode(const Span& span, const UnitParams* whole, Scratch& scratch) {
    switch (span.scheme->body) {
#define GW_ELEMENT(name, group) \
  case Body::name:              \
    return decode_##name(span, whole, scratch);
#include "codec/bodies.def"
#undef GW_ELEMENT
      case Body::own:
        break;
    }
    refuse_body(*span.scheme);
  }
  static Kernels kernels(const char* name) {
    using D = Driver<L>;
    using P = Packing<L>;
    return {name,
            TensorAccess<L>::load,
            BlockStats<L>::absmax,
            BlockStats<L>::sums,
            encode,
            decode,
            TensorAccess<L>::put,
            TensorAccess<L>::put_residual,
            P::pack_block,
            P::unpack_block,
            P::pack_tail,
            P::unpack_tail,
            D::sum_rows,
            D::sum_words};
  }
};
