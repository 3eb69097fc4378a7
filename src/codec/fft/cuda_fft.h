// SPDX-License-Identifier: Apache-2.0
// What the CUDA kernels of the codec `fft` are told beyond a CudaJob, and the functions that launch them; plain C++ as
// cuda_job.h is. A job's items do not matter to them: they go by units, whose tables are here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "codec/fft/fft.h"
#include "device/cuda_job.h"

namespace gradwire {

struct CudaFft {
  FftScheme scheme;
  const float2* table = nullptr;         // device: cuda_fft_table()
  const uint32_t* unit_piece = nullptr;  // device: unit of the group -> piece; unused where there is one piece
  const uint64_t* first_unit = nullptr;  // device: piece -> number of its first unit in the group; as above
  uint64_t units = 0;                    // of all pieces, fft_units() each
  bool tails = false;                    // some piece ends in a partial chunk
};

std::vector<float2> cuda_fft_table();  // fft_table(), re beside im

// A status bit beside those of CudaStatus: a bitmap does not have as many bits as bins are kept.
inline constexpr uint32_t kBadBitmap = 256;

void cuda_encode_fft(const CudaJob& job, const CudaFft& fft, cudaStream_t stream);
void cuda_decode_fft(const CudaJob& job, const CudaFft& fft, cudaStream_t stream);

}  // namespace gradwire
