// SPDX-License-Identifier: Apache-2.0
// The launches of topk's kernels. Compiled with -fmad=false, as all kernels of codecs.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "codec/topk/cuda.h"
#include "codec/topk/layout.h"
#include "codec/topk/level_fit.h"
#include "codec/topk/packed_unit.h"
#include "codec/topk/places.h"
#include "core/checksum.h"
#include "core/random.h"
#include "device/cuda_enqueue.cuh"
#include "device/lane.h"

namespace gradwire {
namespace {

#define GW_BODY __device__ __forceinline__
// Each of these needs the ones before it.
// clang-format off
#include "device/cuda_head.cuh"
#include "device/cuda_load.cuh"
#include "device/cuda_stats.cuh"
#include "device/cuda_pack.cuh"
#include "device/cuda_grid.cuh"
#include "codec/topk/cuda_kept.cuh"
#include "codec/topk/cuda_tile.cuh"
#include "codec/topk/cuda_whole.cuh"
#include "codec/topk/cuda_decode.cuh"
GW_BODY float square_root(float x) { return __fsqrt_rn(x); }
#include "codec/topk/levels-inl.h"
#include "codec/topk/cuda_levels.cuh"
#include "codec/topk/cuda_packed.cuh"
#include "codec/topk/cuda_unpack.cuh"
// clang-format on

template <bool kFeedback>
void encode_whole(const CudaJob& job, const TopkWork& work, cudaStream_t stream) {
  cuda_throw(cudaMemsetAsync(job.tops, 0, job.piece_count * sizeof(uint32_t), stream), "memset");
  const unsigned pieces = std::min(job.piece_count, 65535u);
  launch<whole_max<kFeedback>>(job, job.items, 8, 256, stream);
  enqueue<select_begin>(pieces, 256, 0, stream, job, work);
  for (const int shift : {20, 10, 0}) {
    const int width = shift == 20 ? 11 : 10;
    enqueue<select_count<kFeedback>>(limited(div_up(job.items, 8), 4), 256, 0, stream, job, work, shift, width);
    enqueue<select_digit>(pieces, 256, 0, stream, job, work, shift, width);
  }
  launch<select_places<kFeedback>>(job, job.items, 8, 256, stream, 0, work);
  enqueue<select_scan>(pieces, 1024, 0, stream, job, work);
  launch<select_emit<kFeedback>>(job, job.items, 8, 256, stream, 0, work);
}

class TopkGroup final : public CudaUnitGroup {
 public:
  TopkGroup(const Scheme& scheme, std::span<const CudaPiece> pieces)
      : whole_(scheme.unit == 0), pieces_(pieces.size()) {
    for (const CudaPiece& piece : pieces) blocks_ += div_up(piece.count, kBlock);
  }

  size_t bytes() const override { return whole_ ? counts_at() + blocks_ * sizeof(uint2) : 0; }
  void place(std::byte* memory, cudaStream_t) override {
    if (!whole_) return;
    work_.search = reinterpret_cast<TopkSearch*>(memory);
    work_.block_counts = reinterpret_cast<uint2*>(memory + counts_at());
  }

  void encode(const CudaJob& job, cudaStream_t stream) const override {
    if (job.feedback)
      encode_with<true>(job, stream);
    else
      encode_with<false>(job, stream);
  }

  void decode(const CudaJob& job, cudaStream_t stream) const override {
    if (job.head.expected) cuda_check_head(job, stream);
    if (topk_packed(job.scheme)) {
      launch<unpack_tiles>(job, job.items, 1, 1024, stream);
      return;
    }
    launch<select_fill>(job, block_count(job), 8, 256, stream);
    const dim3 blocks(limited(whole_ ? job.piece_count : job.items, 8), whole_ ? 64 : 1);
    enqueue<select_scatter>(blocks, 256, 0, stream, job);
  }

 private:
  template <bool kFeedback>
  void encode_with(const CudaJob& job, cudaStream_t stream) const {
    if (whole_)
      encode_whole<kFeedback>(job, work_, stream);
    else if (topk_packed(job.scheme))
      launch<pack_tiles<kFeedback>>(job, job.items, 1, 1024, stream);
    else
      launch<select_tiles<kFeedback>>(job, job.items, 1, 1024, stream);
  }

  size_t counts_at() const { return pieces_ * sizeof(TopkSearch); }

  bool whole_;
  uint64_t pieces_, blocks_ = 0;
  TopkWork work_;
};

}  // namespace

const CudaUnitOps kTopkCudaUnits = {[](const Scheme& scheme, std::span<const CudaPiece> pieces) {
  return std::unique_ptr<CudaUnitGroup>(std::make_unique<TopkGroup>(scheme, pieces));
}};

}  // namespace gradwire
