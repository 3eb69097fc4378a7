// SPDX-License-Identifier: Apache-2.0
// Which vector targets are built; included before Highway by every file that is compiled once per target.
#pragma once

// Vectors whose size is known only at run time cannot be members of a struct, as the driver wants them; NEON serves
// Arm. SSE4 is old enough to be the least on x86.
#undef HWY_DISABLED_TARGETS
#define GW_NO_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3)
#if defined( \
    GRADWIRE_ONE_TARGET)  // sanitizer builds: one vector target is enough, and compiles in a quarter of the time
#define HWY_DISABLED_TARGETS (GW_NO_TARGETS | HWY_AVX3 | HWY_SSE4)
#else
#define HWY_DISABLED_TARGETS GW_NO_TARGETS
#endif
