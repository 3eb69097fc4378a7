// SPDX-License-Identifier: Apache-2.0
// The CUDA driver with the element bodies of group a, and the dispatch from a scheme to its body. The kernels before
// and after it know no codec: device/cuda_message.cu. Compiled with -fmad=false: bodies must round every operation by
// itself.
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

#define GW_ELEMENT_a(name) GW_COMPILE_ELEMENT(name)
#define GW_ELEMENT_b(name)
#include "codec/instantiate/cuda_elements-inl.cuh"

void cuda_encode(const CudaJob& job, cudaStream_t stream) {
  if (job.items == 0) return;
  if (job.scheme.unit == 0) {
    cuda_throw(cudaMemsetAsync(job.tops, 0, job.piece_count * sizeof(uint32_t), stream), "memset");
    cuda_throw(cudaMemsetAsync(job.sums, 0, job.piece_count * sizeof(CudaSums), stream), "memset");
    if (job.feedback)
      launch<whole_max<true>>(job, job.items, 8, 256, stream);
    else
      launch<whole_max<false>>(job, job.items, 8, 256, stream);
    if (job.scheme.sums != SumKind::none) {
      if (job.feedback)
        launch<whole_sums<true>>(job, job.items, 8, 256, stream);
      else
        launch<whole_sums<false>>(job, job.items, 8, 256, stream);
    }
  }
  switch (job.scheme.body) {
#define GW_ELEMENT(name, group) \
  case Body::name:              \
    return cuda_encode_##name(job, stream);
#include "codec/bodies.def"
#undef GW_ELEMENT
    case Body::own:
      break;
  }
  refuse_body(job.scheme);
}

void cuda_decode(const CudaJob& job, cudaStream_t stream) {
  if (job.items == 0) return;
  switch (job.scheme.body) {
#define GW_ELEMENT(name, group) \
  case Body::name:              \
    return cuda_decode_##name(job, stream);
#include "codec/bodies.def"
#undef GW_ELEMENT
    case Body::own:
      break;
  }
  refuse_body(job.scheme);
}

}  // namespace gradwire
