// SPDX-License-Identifier: Apache-2.0
// The launches of the codec `fft`'s kernels: one for the full chunks of a group of tensors, and one for the partial
// ones at their ends, if there are any. Compiled with -fmad=false, as all kernels.
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "codec/fft/cuda_fft.h"
#include "core/checksum.h"
#include "core/random.h"
#include "device/lane.h"

namespace gradwire {
namespace {

#define GW_BODY __device__ __forceinline__
#define GW_QUOTIENT(a, b) __fdividef(a, b)
// clang-format off: one builds on the other
// Each of these needs the ones before it.
// clang-format off
#include "device/cuda_head.cuh"
#include "device/cuda_driver.cuh"
#include "codec/fft/fft-inl.h"
#include "codec/fft/cuda_fft.cuh"
#include "codec/fft/cuda_fft_units.cuh"
// clang-format on
// clang-format on

// As many thread blocks as the device holds at once, or fewer; `wanted` blocks would have one turn each.
template <auto kKernel>
void launch(const CudaJob& job, const FftLaunch& l, uint64_t wanted, int threads, size_t shared, cudaStream_t stream) {
  int device = 0, sms = 1, per_sm = 1;
  cuda_throw(cudaGetDevice(&device), "device");
  cuda_throw(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "device");
  if (shared > 48 * 1024)
    cuda_throw(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
               "shared memory");
  cuda_throw(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kKernel, threads, shared), "occupancy");
  const uint64_t blocks =
      std::max<uint64_t>(1, std::min<uint64_t>(wanted, static_cast<uint64_t>(sms) * std::max(per_sm, 1)));
  kKernel<<<static_cast<unsigned>(blocks), threads, shared, stream>>>(job, l);
  cuda_throw(cudaGetLastError(), "kernel launch");
}

template <int kBins>
size_t shared_of(const FftLaunch& l, bool staged) {
  return FftTeam<kBins>::shared_bytes(fft_size_words(l.fft.scheme, 2 * kBins), staged) *
         (FftTeam<kBins>::kBlockThreads / FftTeam<kBins>::kTeam);
}
template <int kBins>
uint64_t blocks_of(const FftLaunch& l) {
  return div_up(l.fft.units, FftTeam<kBins>::kBlockThreads / FftTeam<kBins>::kTeam);
}
// Enough for any partial chunk: a team needs less than one of the full size.
size_t shared_of_tails(const FftLaunch& l) {
  return FftTeam<2048>::shared_bytes(fft_size_words(l.fft.scheme, kFftMostChunk), false);
}

template <class Call>
void with_bins(uint32_t chunk, Call call) {
  switch (chunk) {
    case 256:
      return call.template run<128>();
    case 512:
      return call.template run<256>();
    case 1024:
      return call.template run<512>();
    case 2048:
      return call.template run<1024>();
    default:
      return call.template run<2048>();
  }
}

struct EncodeCall {
  const CudaJob& job;
  const FftLaunch& l;
  cudaStream_t stream;
  template <int kBins>
  void run() {
    const bool fast = job.aligned && job.dtype == DType::f32;
    if (job.feedback)
      fast ? start<fft_encode_full<kBins, true, true>, kBins>() : start<fft_encode_full<kBins, true, false>, kBins>();
    else
      fast ? start<fft_encode_full<kBins, false, true>, kBins>() : start<fft_encode_full<kBins, false, false>, kBins>();
  }
  template <auto kKernel, int kBins>
  void start() {
    const bool staged = job.aligned && job.dtype == DType::f32 && !job.feedback;
    launch<kKernel>(job, l, blocks_of<kBins>(l), FftTeam<kBins>::kBlockThreads, shared_of<kBins>(l, staged), stream);
  }
};

struct DecodeCall {
  const CudaJob& job;
  const FftLaunch& l;
  cudaStream_t stream;
  template <int kBins>
  void run() {
    launch<fft_decode_full<kBins>>(job, l, blocks_of<kBins>(l), FftTeam<kBins>::kBlockThreads,
                                   shared_of<kBins>(l, false), stream);
  }
};

}  // namespace

std::vector<float2> cuda_fft_table() {
  const FftTable& table = fft_table();
  std::vector<float2> pairs(kFftEntries);
  for (uint32_t i = 0; i < kFftEntries; ++i) pairs[i] = make_float2(table.re[i], table.im[i]);
  return pairs;
}

void cuda_encode_fft(const CudaJob& job, const CudaFft& fft, cudaStream_t stream) {
  if (fft.units == 0) return;
  const FftLaunch l{fft, range_float_of(fft.scheme), fft_kept(fft.scheme, fft.scheme.chunk / 2)};
  if (fft.tails) {
    if (job.feedback)
      launch<fft_encode_tails<true>>(job, l, job.piece_count, kFftTailThreads, shared_of_tails(l), stream);
    else
      launch<fft_encode_tails<false>>(job, l, job.piece_count, kFftTailThreads, shared_of_tails(l), stream);
  }
  with_bins(fft.scheme.chunk, EncodeCall{job, l, stream});
}

void cuda_decode_fft(const CudaJob& job, const CudaFft& fft, cudaStream_t stream) {
  if (job.head.expected) cuda_check_head(job, stream);
  if (fft.units == 0) return;
  const FftLaunch l{fft, range_float_of(fft.scheme), fft_kept(fft.scheme, fft.scheme.chunk / 2)};
  if (fft.tails) launch<fft_decode_tails>(job, l, job.piece_count, kFftTailThreads, shared_of_tails(l), stream);
  with_bins(fft.scheme.chunk, DecodeCall{job, l, stream});
}

}  // namespace gradwire
