// SPDX-License-Identifier: Apache-2.0
// The one place where kernels are started, and where they get shared memory whose size the launch decides. Tests have a
// file of this name that runs kernels on a CPU (tests/device/emulated/).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "device/cuda_job.h"

// In a kernel: `name` is the shared memory of its launch, as an array of `type`. A name has the same type everywhere.
#define GW_DYNAMIC_SHARED(type, name) extern __shared__ type name[]

namespace gradwire {

template <auto kKernel, class... Args>
void enqueue(dim3 blocks, unsigned threads, size_t shared, cudaStream_t stream, const Args&... args) {
  kKernel<<<blocks, threads, shared, stream>>>(args...);
  cuda_throw(cudaGetLastError(), "kernel launch");
}

}  // namespace gradwire
