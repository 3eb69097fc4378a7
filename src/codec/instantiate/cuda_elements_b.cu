// SPDX-License-Identifier: Apache-2.0
// The CUDA driver with the element bodies of group b, a file beside cuda_kernels.cu so that the two compile side by
// side. Compiled with -fmad=false: bodies must round every operation by itself.
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "codec/body.h"
#include "codec/instantiate/cuda_elements.h"
#include "codec/stats.h"
#include "core/checksum.h"
#include "core/random.h"
#include "device/cuda_enqueue.cuh"
#include "device/cuda_job.h"
#include "device/lane.h"

namespace gradwire {
namespace {

#define GW_BODY __host__ __device__ __forceinline__
#define GW_DISPATCH inline
// Each of these needs the ones before it.
// clang-format off
#include "codec/bodies.def"
#include "device/cuda_head.cuh"
#include "device/cuda_driver.cuh"
#include "device/cuda_chunks.cuh"
#include "device/cuda_fast.cuh"
#include "device/cuda_launch.cuh"
// clang-format on

}  // namespace

#define GW_ELEMENT_a(name)
#define GW_ELEMENT_b(name) GW_COMPILE_ELEMENT(name)
#include "codec/instantiate/cuda_elements-inl.cuh"

}  // namespace gradwire
