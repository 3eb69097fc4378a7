// SPDX-License-Identifier: Apache-2.0
// The kernels around the work of a message, which know no codec: addresses and keys at its start, the head and the
// check at its end, and samples for codecs that learn. Compiled with -fmad=false: a sample adds the residual as an
// encoder does, which rounds every operation by itself.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "core/checksum.h"
#include "core/random.h"
#include "device/cuda_enqueue.cuh"
#include "device/cuda_job.h"

namespace gradwire {
namespace {

// Each of these needs the ones before it.
// clang-format off
#include "device/cuda_head.cuh"
#include "device/cuda_load.cuh"
#include "device/cuda_grid.cuh"
// clang-format on

// Kernel arguments carry the addresses: unlike a copy from host memory, a launch never waits. One launch takes kPack of
// them.
constexpr size_t kPack = 480;
struct PointerPack {
  const void* p[kPack];
};
__global__ void begin_kernel(const __grid_constant__ PointerPack pack, const __grid_constant__ CudaBegin begin,
                             const void** to, unsigned count, bool first) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) to[i] = pack.p[i];
  if (!first) return;
  if (threadIdx.x == 0) *begin.check = 0;
  if (threadIdx.x == 0 && begin.status) *begin.status = 0;
  if (!begin.keys) return;
  const uint64_t call = call_key(begin.seed, begin.clock ? *begin.clock : begin.step, begin.stage, begin.rank);
  for (unsigned i = threadIdx.x; i < begin.tensors; i += blockDim.x)
    begin.keys[i] = tensor_key(call, begin.name_hashes[i]);
}

__global__ void finish_kernel(const __grid_constant__ CudaHead head, std::byte* message,
                              const unsigned long long* check) {
  for (uint32_t i = threadIdx.x; i < head.bytes / 16; i += blockDim.x)
    reinterpret_cast<uint4*>(message)[i] = reinterpret_cast<const uint4*>(head.expected)[i];
  uint32_t* body = reinterpret_cast<uint32_t*>(message + head.bytes);
  for (uint32_t g = threadIdx.x; g < head.gap_count; g += blockDim.x)
    for (uint64_t w = head.gaps[2 * g]; w < head.gaps[2 * g + 1]; ++w) body[w] = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    *reinterpret_cast<uint64_t*>(message + wire::header::step) = step_of(head);
    *reinterpret_cast<uint32_t*>(message + wire::header::stage) = head.stage;
    *reinterpret_cast<uint32_t*>(message + wire::header::rank) = head.rank;
    *reinterpret_cast<uint32_t*>(message + wire::header::world) = head.world;
    *reinterpret_cast<uint64_t*>(message + wire::header::head_check) = head.head_check;
    *reinterpret_cast<uint64_t*>(message + wire::header::body_check) = seal(*check, head.body_words);
  }
  if (!head.clock) return;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const uint64_t found = device_head_check(message, head.bytes);  // the host does not know the step
  if (threadIdx.x == 0) *reinterpret_cast<uint64_t*>(message + wire::header::head_check) = found;
}

__global__ void head_kernel(const __grid_constant__ CudaJob job) {
  const uint32_t problem = check_head(job);
  if (problem) atomicOr(job.status, problem);
}

__global__ void finish_decode_kernel(const __grid_constant__ CudaJob job, uint32_t* sticky, bool first) {
  uint32_t problem = *job.status;
  if (seal(*job.check, job.head.body_words) !=
      *reinterpret_cast<const uint64_t*>(job.message + wire::header::body_check))
    problem |= kBadBody;
  if (problem == 0) return;
  if (first && blockIdx.x == 0 && threadIdx.x == 0) *sticky |= problem;  // nobody else writes, until wait() reads it
  for (uint64_t i = blockIdx.x; i < block_count(job); i += gridDim.x) {
    const Item item = block_of(job, i);
    for (uint64_t e = item.number * kBlock + threadIdx.x; e < min_u64(item.piece.count, (item.number + 1) * kBlock);
         e += blockDim.x)
      store_value(job.out[item.piece.tensor], job.dtype, false, e, bits_float(kMarker));
  }
}

// As begin_kernel: what to copy travels as an argument, so that nothing waits.
constexpr size_t kPickPack = 96;
struct PickPack {
  CudaPick p[kPickPack];
};
__global__ void sample_kernel(const __grid_constant__ PickPack pack, DType residual, float loss_scale, float* out) {
  const CudaPick& pick = pack.p[blockIdx.x];
  for (uint32_t i = threadIdx.x; i < kBlock; i += blockDim.x) {
    const uint64_t at = pick.block * kBlock + i;
    float x = at < pick.count ? widen_at(pick.in, pick.dtype, at) : 0.0f;
    if (at < pick.count && pick.before) x = x + widen_at(pick.before, residual, at) * loss_scale;
    out[blockIdx.x * kBlock + i] = x;
  }
}

constexpr size_t kStorePack = 3840;
struct StorePack {
  std::byte bytes[kStorePack];
};
__global__ void store_kernel(const __grid_constant__ StorePack pack, std::byte* to, unsigned count) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) to[i] = pack.bytes[i];
}

__global__ void clock_kernel(uint64_t* clock, uint64_t step) { *clock = step; }

}  // namespace

void cuda_set_clock(uint64_t* clock, uint64_t step, cudaStream_t stream) {
  enqueue<clock_kernel>(1, 1, 0, stream, clock, step);
}

void cuda_begin(const CudaBegin& begin, const void* const* host, const void** device, size_t count,
                cudaStream_t stream) {
  size_t at = 0;
  do {
    PointerPack pack;
    const unsigned n = static_cast<unsigned>(std::min(kPack, count - at));
    std::copy(host + at, host + at + n, pack.p);
    enqueue<begin_kernel>(1, 256, 0, stream, pack, begin, device + at, n, at == 0);
    at += kPack;
  } while (at < count);
}

void cuda_sample(std::span<const CudaPick> picks, DType residual, float loss_scale, float* out, cudaStream_t stream) {
  for (size_t at = 0; at < picks.size(); at += kPickPack) {
    PickPack pack;
    const size_t n = std::min(kPickPack, picks.size() - at);
    std::copy(picks.begin() + at, picks.begin() + at + n, pack.p);
    enqueue<sample_kernel>(static_cast<unsigned>(n), 256, 0, stream, pack, residual, loss_scale, out + at * kBlock);
  }
}

void cuda_store(std::byte* to, std::span<const std::byte> from, cudaStream_t stream) {
  for (size_t at = 0; at < from.size(); at += kStorePack) {
    StorePack pack;
    const size_t n = std::min(kStorePack, from.size() - at);
    std::copy_n(from.begin() + static_cast<ptrdiff_t>(at), n, pack.bytes);
    enqueue<store_kernel>(1, 256, 0, stream, pack, to + at, static_cast<unsigned>(n));
  }
}

void cuda_finish_encode(const CudaHead& head, std::byte* message, const unsigned long long* check,
                        cudaStream_t stream) {
  enqueue<finish_kernel>(1, 256, 0, stream, head, message, check);
}

void cuda_check_head(const CudaJob& job, cudaStream_t stream) { enqueue<head_kernel>(1, 256, 0, stream, job); }

void cuda_finish_decode(const CudaJob& job, uint32_t* sticky, bool first, cudaStream_t stream) {
  enqueue<finish_decode_kernel>(limited(job.items, 2), 256, 0, stream, job, sticky, first);
}

}  // namespace gradwire
