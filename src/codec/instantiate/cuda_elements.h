// SPDX-License-Identifier: Apache-2.0
// The element bodies on CUDA: one pair of functions per body, whichever file compiles them.
#pragma once

#include "device/cuda_job.h"

namespace gradwire {

#define GW_ELEMENT(name, group)                                     \
  void cuda_encode_##name(const CudaJob& job, cudaStream_t stream); \
  void cuda_decode_##name(const CudaJob& job, cudaStream_t stream);
#include "codec/bodies.def"
#undef GW_ELEMENT

}  // namespace gradwire
