// SPDX-License-Identifier: Apache-2.0
// What the kernels use of CUDA's language, as plain C++ (emulated_gpu.h). Of several blocks one runs after another, so
// shared memory is static.
#pragma once

// The files of kernels include some of these further down, where `asm` below would be in their way.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"
#include "emulated_gpu.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
// asm volatile("..."), of which there are only prefetches and hints to the optimiser.
#define asm
#define volatile(...)

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

// Masks are taken to be those of whole warps.
#define GW_HERE gradwire::emulated::Place place = gradwire::emulated::Place::current()

inline void __syncthreads(GW_HERE) { gradwire::emulated::meet_block(0, place); }
inline int __syncthreads_count(int value, GW_HERE) {
  return static_cast<int>(gradwire::emulated::meet_block(value != 0, place));
}

// All such barriers are taken to be one.
inline void __barrier_sync_count(unsigned, unsigned count, GW_HERE) { gradwire::emulated::meet_part(count, place); }
inline void __syncwarp(GW_HERE) { gradwire::emulated::meet_warp(0, place); }

inline unsigned __ballot_sync(unsigned, int value, GW_HERE) {
  const gradwire::emulated::WarpValues<int> values(value, place);
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) votes |= unsigned{values[lane] != 0} << lane;
  return votes;
}
inline int __any_sync(unsigned mask, int value, GW_HERE) { return __ballot_sync(mask, value, place) != 0; }
template <class T>
T __shfl_sync(unsigned, T value, int from, GW_HERE) {
  return gradwire::emulated::WarpValues<T>(value, place)[static_cast<unsigned>(from)];
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned by, GW_HERE) {
  const gradwire::emulated::WarpValues<T> values(value, place);
  return values[values.lane < by ? values.lane : values.lane - by];
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned by, GW_HERE) {
  const gradwire::emulated::WarpValues<T> values(value, place);
  return values[values.lane + by > 31 ? values.lane : values.lane + by];
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int with, GW_HERE) {
  const gradwire::emulated::WarpValues<T> values(value, place);
  return values[values.lane ^ static_cast<unsigned>(with)];
}
template <class Combine>
unsigned emulated_reduce(unsigned value, gradwire::emulated::Place place, Combine combine) {
  const gradwire::emulated::WarpValues<unsigned> values(value, place);
  unsigned all = values[0];
  for (unsigned lane = 1; lane < 32; ++lane) all = combine(all, values[lane]);
  return all;
}
inline unsigned __reduce_add_sync(unsigned, unsigned value, GW_HERE) {
  return emulated_reduce(value, place, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value, GW_HERE) {
  return emulated_reduce(value, place, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned __reduce_or_sync(unsigned, unsigned value, GW_HERE) {
  return emulated_reduce(value, place, [](unsigned a, unsigned b) { return a | b; });
}
#undef GW_HERE

template <class T, class U>
T atomicAdd(T* to, U value) {
  const T old = *to;
  *to = static_cast<T>(old + value);
  return old;
}
template <class T, class U>
T atomicOr(T* to, U value) {
  const T old = *to;
  *to = static_cast<T>(old | value);
  return old;
}
template <class T, class U>
T atomicMax(T* to, U value) {
  const T old = *to;
  *to = old < value ? value : old;
  return old;
}

template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
void __stcs(T* to, T value) {
  *to = value;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (by & 31));
}
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
