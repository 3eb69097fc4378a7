// SPDX-License-Identifier: Apache-2.0
// The CUDA driver with the methods' bodies. Compiled with -fmad=false, like cuda_kernels.cu.
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "codec/rangefloat/range_float.h"
#include "core/checksum.h"
#include "core/random.h"
#include "device/cuda_job.h"
#include "device/lane.h"

namespace gradwire {
namespace {

#define GW_BODY __host__ __device__ __forceinline__
#define GW_DISPATCH inline
// Each of these needs the ones before it.
// clang-format off
#include "codec/rangefloat/range_float-inl.h"
#include "codec/methods-inl.h"
#include "device/cuda_head.cuh"
#include "device/cuda_driver.cuh"
#include "device/cuda_fast.cuh"
#include "device/cuda_launch.cuh"
// clang-format on

}  // namespace

void cuda_encode_methods(const CudaJob& job, cudaStream_t stream) {
  EncodeCall call{job, stream};
  with_method(job.scheme, call);
}

void cuda_decode_methods(const CudaJob& job, cudaStream_t stream) {
  DecodeCall call{job, stream};
  with_method(job.scheme, call);
}

}  // namespace gradwire
