// SPDX-License-Identifier: Apache-2.0
// The CPU driver with every body, as one table of functions. Included once per target, like what it is made of. The methods'
// bodies are another file's (cpu_methods.cc), so that the two compile side by side: encode_methods and decode_methods.

template <class L>
struct Table {
  static void encode(const Span& span, const UnitParams* whole, Scratch& scratch, LaneSums& check) {
    if (is_method(*span.scheme)) return encode_methods(span, whole, scratch, check);
    EncodeCall<L> call{span, whole, scratch, check};
    with_body(*span.scheme, call);
  }
  static bool decode(const Span& span, const UnitParams* whole, Scratch& scratch) {
    if (is_method(*span.scheme)) return decode_methods(span, whole, scratch);
    DecodeCall<L> call{span, whole, scratch};
    return with_body(*span.scheme, call);
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
