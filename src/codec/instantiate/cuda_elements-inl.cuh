// SPDX-License-Identifier: Apache-2.0
// The functions of cuda_elements.h. GW_ELEMENT_a and GW_ELEMENT_b say what becomes of the bodies of either group:
// GW_COMPILE_ELEMENT here, or nothing. Included after the drivers.

#define GW_COMPILE_ELEMENT(name)                                     \
  void cuda_encode_##name(const CudaJob& job, cudaStream_t stream) { \
    CudaEncodeCall call{job, stream};                                \
    with_##name(job.scheme, call);                                   \
  }                                                                  \
  void cuda_decode_##name(const CudaJob& job, cudaStream_t stream) { \
    CudaDecodeCall call{job, stream};                                \
    with_##name(job.scheme, call);                                   \
  }
#define GW_ELEMENT(name, group) GW_ELEMENT_##group(name)
#include "codec/bodies.def"
#undef GW_ELEMENT
#undef GW_COMPILE_ELEMENT
