// SPDX-License-Identifier: Apache-2.0
// GW_TARGET(bit, namespace) for every vector target that this compiler built, best first. No include guard: whoever
// includes it says what GW_TARGET does.
#if HWY_TARGETS & HWY_AVX3
GW_TARGET(HWY_AVX3, N_AVX3)
#endif
#if HWY_TARGETS & HWY_AVX2
GW_TARGET(HWY_AVX2, N_AVX2)
#endif
#if HWY_TARGETS & HWY_SSE4
GW_TARGET(HWY_SSE4, N_SSE4)
#endif
#if HWY_TARGETS & HWY_NEON
GW_TARGET(HWY_NEON, N_NEON)
#endif
#undef GW_TARGET
