// SPDX-License-Identifier: Apache-2.0
// One launch for many spans: up to kPack of them travel as the kernel's argument, one row of thread blocks each, so
// nothing is copied to the device first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "device/cuda_job.h"

namespace gradwire {

constexpr size_t kPack = 64;
constexpr unsigned kPackThreads = 256,
                   kPackRow = 1024;  // threads a block, blocks a row at most: a large span fills the device

template <class Span>
struct Pack {
  Span spans[kPack];
};

// launch(pack, grid) for the spans that are not empty, kPack at a time. `each`: elements that a thread takes at once.
template <class Span, class Launch>
void in_packs(int index, std::span<const Span> spans, uint64_t each, Launch&& launch) {
  cuda_throw(cudaSetDevice(index), "cudaSetDevice");
  Pack<Span> pack{};
  unsigned n = 0;
  uint64_t longest = 0;
  const auto flush = [&] {
    if (n == 0) return;
    const uint64_t threads = (longest + each - 1) / each;
    const auto blocks =
        static_cast<unsigned>(std::min<uint64_t>((threads + kPackThreads - 1) / kPackThreads, kPackRow));
    launch(pack, dim3(blocks, n));
    cuda_throw(cudaGetLastError(), "kernel launch");
    n = 0;
    longest = 0;
  };
  for (const Span& span : spans) {
    if (span.count == 0) continue;
    pack.spans[n++] = span;
    longest = std::max<uint64_t>(longest, span.count);
    if (n == kPack) flush();
  }
  flush();
}

}  // namespace gradwire
