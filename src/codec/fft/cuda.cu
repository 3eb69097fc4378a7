// SPDX-License-Identifier: Apache-2.0
// The launches of the kernels of the codec `fft`: one for the full chunks of a group of tensors, and one for the
// partial ones at their ends, if there are any. Compiled with -fmad=false, as all kernels of codecs.
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "codec/fft/cuda.h"
#include "codec/fft/fft.h"
#include "core/checksum.h"
#include "core/random.h"
#include "device/cuda_enqueue.cuh"
#include "device/lane.h"

namespace gradwire {
namespace {

#define GW_BODY __device__ __forceinline__
#define GW_QUOTIENT(a, b) __fdividef(a, b)
// Each of these needs the ones before it.
// clang-format off
#include "device/cuda_head.cuh"
#include "device/cuda_load.cuh"
#include "device/cuda_stats.cuh"
#include "device/cuda_pack.cuh"
#include "device/cuda_grid.cuh"
#include "codec/rangefloat/range_float-inl.h"
#include "codec/fft/transform-inl.h"
#include "codec/fft/cuda_team.cuh"
#include "codec/fft/cuda_units.cuh"
// clang-format on

// As many thread blocks as the device holds at once, or fewer; `wanted` blocks would have one turn each.
template <auto kKernel>
void launch_units(const CudaJob& job, const FftLaunch& l, uint64_t wanted, unsigned threads, size_t shared,
                  cudaStream_t stream) {
  enqueue<kKernel>(limited(wanted, per_multiprocessor<kKernel>(threads, shared)), threads, shared, stream, job, l);
}

template <int kBins>
size_t shared_of(const FftLaunch& l, bool staged) {
  return FftTeam<kBins>::shared_bytes(fft_size_words(l.scheme, 2 * kBins), staged) *
         (FftTeam<kBins>::kBlockThreads / FftTeam<kBins>::kTeam);
}
template <int kBins>
uint64_t blocks_of(const FftLaunch& l) {
  return div_up(l.units, FftTeam<kBins>::kBlockThreads / FftTeam<kBins>::kTeam);
}
// Enough for any partial chunk: a team needs less than one of the full size.
size_t shared_of_tails(const FftLaunch& l) {
  return FftTeam<2048>::shared_bytes(fft_size_words(l.scheme, kFftMostChunk), false);
}

template <class Call>
void with_bins(uint32_t chunk, Call call) {
  switch (chunk) {
    case 256:
      return call.template operator()<128>();
    case 512:
      return call.template operator()<256>();
    case 1024:
      return call.template operator()<512>();
    case 2048:
      return call.template operator()<1024>();
    default:
      return call.template operator()<2048>();
  }
}

template <int kBins, bool kFeedback, bool kFast>
void encode_full_chunks(const CudaJob& job, const FftLaunch& l, cudaStream_t stream) {
  launch_units<fft_encode_full<kBins, kFeedback, kFast>>(job, l, blocks_of<kBins>(l), FftTeam<kBins>::kBlockThreads,
                                                         shared_of<kBins>(l, kFast), stream);
}

class FftGroup final : public CudaUnitGroup {
 public:
  FftGroup(const Scheme& scheme, std::span<const CudaPiece> pieces) {
    launch_.scheme = fft_scheme(scheme);
    launch_.range = range_float_of(launch_.scheme);
    launch_.kept = fft_kept(launch_.scheme, launch_.scheme.chunk / 2);
    for (const CudaPiece& piece : pieces) {
      first_unit_.push_back(unit_piece_.size());
      unit_piece_.insert(unit_piece_.end(), fft_units(launch_.scheme, piece.count),
                         static_cast<uint32_t>(first_unit_.size() - 1));
      tails_ |= piece.count % launch_.scheme.chunk != 0;
    }
    launch_.units = unit_piece_.size();
  }

  // The table of the transform, then the first units of the pieces, then the pieces of the units: 8, 8 and 4 bytes
  // each.
  size_t bytes() const override { return (kFftEntries + first_unit_.size()) * 8 + unit_piece_.size() * 4; }
  void place(std::byte* memory, cudaStream_t stream) override {
    const FftTable& table = fft_table();
    std::vector<float2> pairs(kFftEntries);
    for (uint32_t i = 0; i < kFftEntries; ++i) pairs[i] = make_float2(table.re[i], table.im[i]);
    float2* const numbers = reinterpret_cast<float2*>(memory);
    uint64_t* const first_unit = reinterpret_cast<uint64_t*>(numbers + kFftEntries);
    uint32_t* const unit_piece = reinterpret_cast<uint32_t*>(first_unit + first_unit_.size());
    copy(numbers, pairs, stream);
    copy(first_unit, first_unit_, stream);
    copy(unit_piece, unit_piece_, stream);
    cuda_throw(cudaStreamSynchronize(stream), "cudaStreamSynchronize");  // `pairs` goes
    launch_.table = numbers;
    launch_.first_unit = first_unit;
    launch_.unit_piece = unit_piece;
  }

  void encode(const CudaJob& job, cudaStream_t stream) const override {
    if (tails_ && job.feedback)
      launch_units<fft_encode_tails<true>>(job, launch_, job.piece_count, kFftTailThreads, shared_of_tails(launch_),
                                           stream);
    else if (tails_)
      launch_units<fft_encode_tails<false>>(job, launch_, job.piece_count, kFftTailThreads, shared_of_tails(launch_),
                                            stream);
    const bool fast = job.aligned && job.dtype == DType::f32;
    with_bins(launch_.scheme.chunk, [&]<int kBins>() {
      if (job.feedback)
        fast ? encode_full_chunks<kBins, true, true>(job, launch_, stream)
             : encode_full_chunks<kBins, true, false>(job, launch_, stream);
      else
        fast ? encode_full_chunks<kBins, false, true>(job, launch_, stream)
             : encode_full_chunks<kBins, false, false>(job, launch_, stream);
    });
  }

  void decode(const CudaJob& job, cudaStream_t stream) const override {
    if (job.head.expected) cuda_check_head(job, stream);
    if (tails_)
      launch_units<fft_decode_tails>(job, launch_, job.piece_count, kFftTailThreads, shared_of_tails(launch_), stream);
    with_bins(launch_.scheme.chunk, [&]<int kBins>() {
      launch_units<fft_decode_full<kBins>>(job, launch_, blocks_of<kBins>(launch_), FftTeam<kBins>::kBlockThreads,
                                           shared_of<kBins>(launch_, false), stream);
    });
  }

 private:
  template <class T>
  static void copy(T* to, const std::vector<T>& from, cudaStream_t stream) {
    cuda_throw(cudaMemcpyAsync(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync");
  }

  std::vector<uint32_t> unit_piece_;  // unit -> piece
  std::vector<uint64_t> first_unit_;  // piece -> its first unit
  bool tails_ = false;                // some piece ends in a partial chunk
  FftLaunch launch_;
};

}  // namespace

const CudaUnitOps kFftCudaUnits = {[](const Scheme& scheme, std::span<const CudaPiece> pieces) {
  return std::unique_ptr<CudaUnitGroup>(std::make_unique<FftGroup>(scheme, pieces));
}};

}  // namespace gradwire
