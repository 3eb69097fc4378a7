// SPDX-License-Identifier: Apache-2.0
// One thread block of a GPU at a time, on a CPU: so that the kernels themselves, compiled as plain C++, can be tested
// where there is no GPU and no CUDA. The headers of this folder stand in for those of CUDA.
//
// Each thread of a block is a fiber with a stack of its own. It runs until it comes to a barrier or to an operation of
// its warp, and goes on when all threads that this needs have come to the same place of the source. If some of them can
// never come, the run ends with a std::runtime_error that names the place. Warps, lanes and thread blocks take their
// turns in random order, and a warp runs as far ahead as it can, so a barrier that is missing shows as wrong results.
//
// Copies to shared memory that nobody waits for yet take place at once or as late as they may, by chance.
//
// Several threads of the host may use the GPU; their kernels run one after another. A stream runs what it is given at
// once, or keeps it for a graph while it is captured.
//
// What this cannot show: races within the instructions between two such places that the order does not happen to
// expose, the memory model, alignment of vector loads, limits on registers, and speed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1  // GCC's word for it
#endif
#endif

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct EmulatedStream;
inline dim3 threadIdx, blockIdx, blockDim, gridDim;  // of the fiber that runs

namespace gradwire::emulated {

#if defined(__cpp_lib_source_location)
using Place = std::source_location;
#else  // clang 14, which knows no columns here
struct SourcePlace {
  static SourcePlace current(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
    return {file, line};
  }
  const char* file_name() const { return file_; }
  unsigned line() const { return line_; }
  unsigned column() const { return 0; }
  const char* file_ = "";
  unsigned line_ = 0;
};
using Place = SourcePlace;
#endif

// Runs `kernel` for every thread of every block, with `shared` bytes beside its static shared memory.
void run(dim3 blocks, unsigned threads, const std::function<void()>& kernel, size_t shared = 0);

// The same on a stream: now, or when the graph that captures it is launched. The arguments of a kernel, and those of a
// copy or a fill, are part of `work`.
void perform(EmulatedStream* stream, std::function<void()> work);

// Those bytes, for the kernel that runs.
void* dynamic_shared();

// How many runs there were so far: a test shows by it that its kernels ran.
uint64_t runs();

// For the thread that calls: waits for the 32 of its warp, or for all of its block. Returns the values that they came
// with, for a block their sum.
const uint64_t* meet_warp(uint64_t value, Place place);
uint64_t meet_block(uint64_t value, Place place);
void meet_part(unsigned count, Place place);  // waits for so many threads of its block

// For the thread that calls: copies in groups, and the wait for all but the last `left` groups.
void copy_later(void* to, const void* from, size_t bytes);
void commit_copies();
void wait_for_copies(size_t left);

// A value of up to 8 bytes, as it was, from each lane.
template <class T>
struct WarpValues {
  const uint64_t* all;
  unsigned lane = threadIdx.x % 32;
  WarpValues(T value, Place place) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    all = meet_warp(bits, place);
  }
  T operator[](unsigned from) const {
    T value;
    std::memcpy(&value, all + from % 32, sizeof value);
    return value;
  }
};

}  // namespace gradwire::emulated
