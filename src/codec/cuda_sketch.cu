// SPDX-License-Identifier: Apache-2.0
// The launches of casq's kernels. Compiled with -fmad=false, like cuda_kernels.cu.
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "codec/casq/sketch.h"
#include "core/checksum.h"
#include "core/random.h"
#include "device/cuda_job.h"
#include "device/lane.h"

namespace gradwire {
namespace {

// Each of these needs the ones before it.
// clang-format off
#include "device/cuda_head.cuh"
#include "device/cuda_driver.cuh"
#include "device/cuda_fast.cuh"
#include "device/cuda_launch.cuh"
#include "codec/casq/cuda_clusters.cuh"
#include "codec/casq/cuda_sketch.cuh"
#include "codec/casq/cuda_sketch_hash.cuh"
// clang-format on

// A thread block a tile, and as many as the device holds at once. What they share goes by the scheme.
template <auto kKernel>
void launch_tiles(const CudaJob& job, size_t shared, cudaStream_t stream) {
  int per_sm = 1;
  cuda_throw(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
             "shared memory");
  cuda_throw(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kKernel, 1024, shared), "occupancy");
  kKernel<<<limited(job.items, per_sm), 1024, shared, stream>>>(job);
  cuda_throw(cudaGetLastError(), "kernel launch");
}

dim3 side_blocks(const CudaJob& job) { return dim3(limited(job.piece_count, 8), 64); }

template <int kBits, bool kFeedback>
void encode(const CudaJob& job, cudaStream_t stream) {
  if (!hashed(job.scheme)) return launch_tiles<sketch_encode<kBits, kFeedback>>(job, kEncodeShared<kBits>, stream);
  launch<whole_max<kFeedback>>(job, job.items, 8, 256, stream);
  launch<whole_sums<kFeedback>>(job, job.items, 8, 256, stream);
  launch<hash_add<kBits, kFeedback>>(job, job.items, 8, 256, stream);
  hash_means<<<side_blocks(job), 256, 0, stream>>>(job);
  if constexpr (kFeedback) launch<hash_residuals<kBits>>(job, job.items, 8, 256, stream);
  cuda_throw(cudaGetLastError(), "kernel launch");
}

template <int kBits>
void decode(const CudaJob& job, cudaStream_t stream) {
  if (!hashed(job.scheme)) {
    const uint64_t values = div_up(buckets_of(job.scheme, kTile), 2) * 2;
    return launch_tiles<sketch_decode<kBits>>(job, (Ranks<kBits>::kRows + values) * sizeof(uint32_t), stream);
  }
  hash_check<<<side_blocks(job), 256, 0, stream>>>(job);
  launch<hash_decode<kBits>>(job, job.items, 8, 256, stream);
}

template <int kBits>
void encode(const CudaJob& job, cudaStream_t stream) {
  if (job.feedback)
    encode<kBits, true>(job, stream);
  else
    encode<kBits, false>(job, stream);
}

}  // namespace

void cuda_encode_sketch(const CudaJob& job, cudaStream_t stream) {
  if (hashed(job.scheme)) {
    cuda_throw(cudaMemsetAsync(job.tops, 0, job.piece_count * sizeof(uint32_t), stream), "memset");
    cuda_throw(cudaMemsetAsync(job.sums, 0, job.piece_count * sizeof(CudaSums), stream), "memset");
    cuda_throw(cudaMemsetAsync(job.bucket_sums, 0, job.buckets * sizeof(unsigned long long), stream), "memset");
    cuda_throw(cudaMemsetAsync(job.bucket_counts, 0, job.buckets * sizeof(uint32_t), stream), "memset");
  }
  switch (job.scheme.bits) {
    case 1:
      return encode<1>(job, stream);
    case 2:
      return encode<2>(job, stream);
    case 3:
      return encode<3>(job, stream);
    default:
      return encode<4>(job, stream);
  }
}

void cuda_decode_sketch(const CudaJob& job, cudaStream_t stream) {
  if (job.head.expected) cuda_check_head(job, stream);
  switch (job.scheme.bits) {
    case 1:
      return decode<1>(job, stream);
    case 2:
      return decode<2>(job, stream);
    case 3:
      return decode<3>(job, stream);
    default:
      return decode<4>(job, stream);
  }
}

}  // namespace gradwire
