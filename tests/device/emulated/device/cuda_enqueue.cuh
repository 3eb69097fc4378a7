// SPDX-License-Identifier: Apache-2.0
// Stands in for the product's file of this name: how kernels are started on an emulated GPU.
#pragma once

#include "cuda_runtime.h"

#define GW_DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(gradwire::emulated::dynamic_shared())

namespace gradwire {

template <auto kKernel, class... Args>
void enqueue(dim3 blocks, unsigned threads, size_t shared, cudaStream_t stream, const Args&... args) {
  emulated::perform(stream, [=] {
    emulated::run(
        blocks, threads, [&] { kKernel(args...); }, shared);
  });
}

}  // namespace gradwire
