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
      case Body::select:
      case Body::clusters:
      case Body::fft:
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
      case Body::select:
      case Body::clusters:
      case Body::fft:
        break;
    }
    refuse_body(*span.scheme);
  }
  static Kernels kernels(const char* name) {
    using D = Driver<L>;
    using P = Packing<L>;
    using S = SketchDriver<L>;
    return {name,
            D::stage,
            D::absmax,
            D::sums,
            encode,
            decode,
            Selection<L>::select,
            D::put,
            D::put_residual,
            S::classify,
            S::split,
            S::merge,
            S::count,
            S::round,
            S::narrow_means,
            S::widen_means,
            P::pack_block,
            P::unpack_block,
            P::pack_tail,
            P::unpack_tail,
            D::sum_rows,
            D::sum_words};
  }
};
