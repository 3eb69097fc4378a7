// SPDX-License-Identifier: Apache-2.0
// The CPU driver with every body, as one table of functions. Included once per target, like what it is made of.

template <class L>
struct Table {
  struct Encode {
    const Span& span;
    const UnitParams* whole;
    Scratch& scratch;
    LaneSums& check;
    template <class B>
    GW_BODY void run() {
      Driver<L>::template encode<B>(span, whole, scratch, check);
    }
  };
  struct Decode {
    const Span& span;
    const UnitParams* whole;
    Scratch& scratch;
    template <class B>
    GW_BODY bool run() {
      return Driver<L>::template decode<B>(span, whole, scratch);
    }
  };
  static void encode(const Span& span, const UnitParams* whole, Scratch& scratch, LaneSums& check) {
    Encode call{span, whole, scratch, check};
    with_body(*span.scheme, call);
  }
  static bool decode(const Span& span, const UnitParams* whole, Scratch& scratch) {
    Decode call{span, whole, scratch};
    return with_body(*span.scheme, call);
  }
  static Kernels kernels(const char* name) {
    using D = Driver<L>;
    return {name, D::stage, D::absmax, D::sums, encode, decode, D::select, D::put, D::put_residual, D::sum_words};
  }
};
