// SPDX-License-Identifier: Apache-2.0
// The launches of casq's kernels. Compiled with -fmad=false, as all kernels of codecs.
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "codec/casq/cuda.h"
#include "codec/casq/layout.h"
#include "core/checksum.h"
#include "core/random.h"
#include "device/cuda_enqueue.cuh"
#include "device/lane.h"

namespace gradwire {
namespace {

// Each of these needs the ones before it.
// clang-format off
#include "device/cuda_head.cuh"
#include "device/cuda_load.cuh"
#include "device/cuda_stats.cuh"
#include "device/cuda_pack.cuh"
#include "device/cuda_grid.cuh"
#include "codec/casq/cuda_codes.cuh"
#include "codec/casq/cuda_tile.cuh"
#include "codec/casq/cuda_hash.cuh"
// clang-format on

// A thread block per tile, and as many as the device holds at once. How much they share goes by the scheme.
template <auto kKernel>
void launch_tiles(const CudaJob& job, size_t shared, cudaStream_t stream) {
  enqueue<kKernel>(limited(job.items, per_multiprocessor<kKernel>(1024, shared)), 1024, shared, stream, job);
}

dim3 table_blocks(const CudaJob& job) { return dim3(limited(job.piece_count, 8), 64); }

template <int kBits, bool kFeedback>
void encode_casq(const CudaJob& job, const CasqWork& work, cudaStream_t stream) {
  if (!hashed(job.scheme)) return launch_tiles<encode_tiles<kBits, kFeedback>>(job, kEncodeShared<kBits>, stream);
  cuda_throw(cudaMemsetAsync(job.tops, 0, job.piece_count * sizeof(uint32_t), stream), "memset");
  cuda_throw(cudaMemsetAsync(job.sums, 0, job.piece_count * sizeof(CudaSums), stream), "memset");
  cuda_throw(cudaMemsetAsync(work.sums, 0, work.buckets * sizeof(unsigned long long), stream), "memset");
  cuda_throw(cudaMemsetAsync(work.counts, 0, work.buckets * sizeof(uint32_t), stream), "memset");
  launch<whole_max<kFeedback>>(job, job.items, 8, 256, stream);
  launch<whole_sums<kFeedback>>(job, job.items, 8, 256, stream);
  launch<hash_add<kBits, kFeedback>>(job, job.items, 8, 256, stream, 0, work);
  enqueue<hash_means>(table_blocks(job), 256, 0, stream, job, work);
  if constexpr (kFeedback) launch<hash_residuals<kBits>>(job, job.items, 8, 256, stream);
}

template <int kBits>
void decode_casq(const CudaJob& job, cudaStream_t stream) {
  if (!hashed(job.scheme)) {
    const uint64_t values = div_up(buckets_of(job.scheme, kTile), 2) * 2;
    return launch_tiles<decode_tiles<kBits>>(job, (TileRanks<kBits>::kRows + values) * sizeof(uint32_t), stream);
  }
  enqueue<hash_check>(table_blocks(job), 256, 0, stream, job);
  launch<hash_decode<kBits>>(job, job.items, 8, 256, stream);
}

template <class Call>
void with_bits(int bits, Call call) {
  switch (bits) {
    case 1:
      return call.template operator()<1>();
    case 2:
      return call.template operator()<2>();
    case 3:
      return call.template operator()<3>();
    default:
      return call.template operator()<4>();
  }
}

class CasqGroup final : public CudaUnitGroup {
 public:
  CasqGroup(const Scheme& scheme, std::span<const CudaPiece> pieces) {
    if (!hashed(scheme)) return;
    for (const CudaPiece& piece : pieces) {
      first_bucket_.push_back(work_.buckets);
      work_.buckets += buckets_of(scheme, piece.count);
    }
  }

  // Sums of 8 bytes come first, then the first buckets of the pieces, then counts of 4 bytes.
  size_t bytes() const override { return (work_.buckets + first_bucket_.size()) * 8 + work_.buckets * 4; }
  void place(std::byte* memory, cudaStream_t stream) override {
    if (first_bucket_.empty()) return;
    work_.sums = reinterpret_cast<unsigned long long*>(memory);
    uint64_t* const first = reinterpret_cast<uint64_t*>(memory + work_.buckets * 8);
    work_.counts = reinterpret_cast<uint32_t*>(first + first_bucket_.size());
    work_.first_bucket = first;
    cuda_throw(cudaMemcpyAsync(first, first_bucket_.data(), first_bucket_.size() * 8, cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync");
  }

  void encode(const CudaJob& job, cudaStream_t stream) const override {
    with_bits(job.scheme.bits, [&]<int kBits>() {
      if (job.feedback)
        encode_casq<kBits, true>(job, work_, stream);
      else
        encode_casq<kBits, false>(job, work_, stream);
    });
  }

  void decode(const CudaJob& job, cudaStream_t stream) const override {
    if (job.head.expected) cuda_check_head(job, stream);
    with_bits(job.scheme.bits, [&]<int kBits>() { decode_casq<kBits>(job, stream); });
  }

 private:
  std::vector<uint64_t> first_bucket_;  // of each piece, in mode=paper
  CasqWork work_;
};

}  // namespace

const CudaUnitOps kCasqCudaUnits = {[](const Scheme& scheme, std::span<const CudaPiece> pieces) {
  return std::unique_ptr<CudaUnitGroup>(std::make_unique<CasqGroup>(scheme, pieces));
}};

}  // namespace gradwire
