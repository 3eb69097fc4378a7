// SPDX-License-Identifier: Apache-2.0
// The CUDA driver with every body, the kernels around it (pointer tables, head, checks), and the launches. Compiled
// with -fmad=false: bodies must round every operation by itself.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/checksum.h"
#include "core/random.h"
#include "device/cuda_job.h"
#include "device/lane.h"

namespace gradwire {
namespace {

#define GW_BODY __host__ __device__ __forceinline__
#define GW_DISPATCH inline
#include "codec/bodies-inl.h"
#include "device/cuda_driver.cuh"
#include "device/cuda_select.cuh"

// Enough thread blocks to fill the device, no more: kernels walk over their items, and add one partial sum each.
struct Grid1 {
  int sms = 0;
  Grid1() {
    int device = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  }
  unsigned blocks(uint64_t wanted, unsigned per_sm) const {
    return static_cast<unsigned>(std::max<uint64_t>(1, std::min<uint64_t>(wanted, static_cast<uint64_t>(sms) * per_sm)));
  }
};

template <class Kernel>
void launch(Kernel kernel, const CudaJob& job, uint64_t items, unsigned items_per_block, unsigned threads, cudaStream_t stream) {
  int per_sm = 1;
  cuda_throw(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, 0), "occupancy");
  const Grid1 grid;
  kernel<<<grid.blocks(div_up(items, items_per_block), std::max(per_sm, 1)), threads, 0, stream>>>(job);
  cuda_throw(cudaGetLastError(), "kernel launch");
}

struct EncodeCall {
  const CudaJob& job;
  cudaStream_t stream;
  template <class B>
  void run() {
    if constexpr (B::kCodeBits <= 8) {
      if (chunked(job.scheme)) {
        if (job.feedback)
          launch(encode_chunks<B, true>, job, job.items, 1, 1024, stream);
        else
          launch(encode_chunks<B, false>, job, job.items, 1, 1024, stream);
        return;
      }
    }
    if (job.feedback)
      launch(encode_blocks<B, true>, job, job.items, 8, 256, stream);
    else
      launch(encode_blocks<B, false>, job, job.items, 8, 256, stream);
  }
};

struct DecodeCall {
  const CudaJob& job;
  cudaStream_t stream;
  template <class B>
  void run() {
    launch(decode_blocks<B>, job, block_count(job), 8, 256, stream);
  }
};

__global__ void begin_kernel(unsigned long long* check, uint32_t* status) {
  *check = 0;
  if (status) *status = 0;
}

constexpr size_t kPack = 480;
struct PointerPack {
  const void* p[kPack];
};
__global__ void pointers_kernel(const __grid_constant__ PointerPack pack, const void** to, unsigned count) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) to[i] = pack.p[i];
}

__global__ void finish_kernel(const __grid_constant__ CudaHead head, std::byte* message, const unsigned long long* check) {
  for (uint32_t i = threadIdx.x; i < head.bytes; i += blockDim.x) message[i] = head.expected[i];
  uint32_t* body = reinterpret_cast<uint32_t*>(message + head.bytes);
  for (uint32_t g = 0; g < head.gap_count; ++g)
    for (uint64_t w = head.gaps[2 * g] + threadIdx.x; w < head.gaps[2 * g + 1]; w += blockDim.x) body[w] = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    *reinterpret_cast<uint64_t*>(message + 16) = head.step;
    *reinterpret_cast<uint32_t*>(message + 24) = head.stage;
    *reinterpret_cast<uint32_t*>(message + 28) = head.rank;
    *reinterpret_cast<uint32_t*>(message + 32) = head.world;
    *reinterpret_cast<uint64_t*>(message + 48) = head.head_check;
    *reinterpret_cast<uint64_t*>(message + 56) = seal(*check, head.body_words);
  }
}

// XXH64 (seed 0) of bytes [0, 48) and [64, bytes) of a head, both multiples of 8. One thread; heads are a few kilobytes.
__device__ uint64_t device_head_check(const std::byte* head, uint32_t bytes) {
  constexpr uint64_t p1 = 0x9e3779b185ebca87ull, p2 = 0xc2b2ae3d27d4eb4full, p3 = 0x165667b19e3779f9ull, p4 = 0x85ebca77c2b2ae63ull,
                     p5 = 0x27d4eb2f165667c5ull;
  const auto rotate = [](uint64_t x, int r) { return x << r | x >> (64 - r); };
  const auto round = [&](uint64_t acc, uint64_t in) { return rotate(acc + in * p2, 31) * p1; };
  const uint64_t* words = reinterpret_cast<const uint64_t*>(head);
  const uint32_t count = bytes / 8 - 2;  // without the two checks
  const auto word = [&](uint32_t i) { return words[i < 6 ? i : i + 2]; };
  uint64_t h;
  uint32_t i = 0;
  if (count >= 4) {
    uint64_t v[4] = {p1 + p2, p2, 0, 0 - p1};
    for (; i + 4 <= count; i += 4)
      for (int k = 0; k < 4; ++k) v[k] = round(v[k], word(i + k));
    h = rotate(v[0], 1) + rotate(v[1], 7) + rotate(v[2], 12) + rotate(v[3], 18);
    for (int k = 0; k < 4; ++k) h = (h ^ round(0, v[k])) * p1 + p4;
  } else {
    h = p5;
  }
  h += uint64_t{count} * 8;
  for (; i < count; ++i) h = rotate(h ^ round(0, word(i)), 27) * p1 + p4;
  h ^= h >> 33;
  h *= p2;
  h ^= h >> 29;
  h *= p3;
  return h ^ h >> 32;
}

__global__ void check_kernel(const __grid_constant__ CudaHead head, const std::byte* message, const unsigned long long* check, uint32_t* status, uint32_t* sticky) {
  uint32_t problem = 0;
  // Every byte as planned, but for the stamp, the checks, and the element types, which only say what the sender had.
  for (uint32_t i = threadIdx.x; i < head.bytes; i += blockDim.x) {
    if ((i >= 16 && i < 36) || (i >= 48 && i < 64)) continue;
    if (i >= head.first_tensor_at && (i - head.first_tensor_at) % 40 == 34 && static_cast<uint8_t>(message[i]) <= 2) continue;
    if (message[i] != head.expected[i]) problem |= kBadHead;
  }
  const uint32_t* body = reinterpret_cast<const uint32_t*>(message + head.bytes);
  for (uint32_t g = 0; g < head.gap_count; ++g)
    for (uint64_t w = head.gaps[2 * g] + threadIdx.x; w < head.gaps[2 * g + 1]; w += blockDim.x)
      if (body[w] != 0) problem |= kBadPadding;
  if (threadIdx.x == 0) {
    const uint32_t rank = *reinterpret_cast<const uint32_t*>(message + 28), world = *reinterpret_cast<const uint32_t*>(message + 32);
    if (device_head_check(message, head.bytes) != *reinterpret_cast<const uint64_t*>(message + 48)) problem |= kBadHead;
    if (rank >= world) problem |= kBadStamp;
    if (head.has_stamp && (*reinterpret_cast<const uint64_t*>(message + 16) != head.step ||
                           *reinterpret_cast<const uint32_t*>(message + 24) != head.stage || rank != head.rank || world != head.world))
      problem |= kBadStamp;
    if (seal(*check, head.body_words) != *reinterpret_cast<const uint64_t*>(message + 56)) problem |= kBadBody;
  }
  if (problem) atomicOr(status, problem);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *sticky |= atomicOr(status, 0);  // until wait() reads it
}

__global__ void poison_kernel(const __grid_constant__ CudaJob job) {
  if (*job.status == 0) return;
  for (uint64_t i = blockIdx.x; i < block_count(job); i += gridDim.x) {
    const Item item = block_of(job, i);
    const uint64_t block = item.number;
    for (uint64_t e = block * kBlock + threadIdx.x; e < min_u64(item.piece.count, (block + 1) * kBlock); e += blockDim.x)
      store_value(job.out[item.piece.tensor], job.dtype, false, e, bits_float(kMarker));
  }
}

template <bool kFeedback>
void encode_selected(const CudaJob& job, cudaStream_t stream) {
  if (job.scheme.unit) {
    launch(select_tiles<kFeedback>, job, job.items, 1, 1024, stream);
    return;
  }
  const unsigned pieces = std::min(job.piece_count, 65535u);
  launch(whole_max<kFeedback>, job, job.items, 8, 256, stream);
  select_begin<<<pieces, 256, 0, stream>>>(job);
  for (const int shift : {20, 10, 0}) {
    const int width = shift == 20 ? 11 : 10;
    const Grid1 grid;
    select_count<kFeedback><<<grid.blocks(div_up(job.items, 8), 4), 256, 0, stream>>>(job, shift, width);
    select_digit<<<pieces, 256, 0, stream>>>(job, shift, width);
  }
  launch(select_places<kFeedback>, job, job.items, 8, 256, stream);
  select_scan<<<pieces, 1024, 0, stream>>>(job);
  launch(select_emit<kFeedback>, job, job.items, 8, 256, stream);
  cuda_throw(cudaGetLastError(), "kernel launch");
}

}  // namespace

void cuda_begin(unsigned long long* check, uint32_t* status, cudaStream_t stream) {
  begin_kernel<<<1, 1, 0, stream>>>(check, status);
  cuda_throw(cudaGetLastError(), "kernel launch");
}

void cuda_pointers(const void* const* host, const void** device, size_t count, cudaStream_t stream) {
  for (size_t at = 0; at < count; at += kPack) {
    PointerPack pack{};
    const unsigned n = static_cast<unsigned>(std::min(kPack, count - at));
    std::copy(host + at, host + at + n, pack.p);
    pointers_kernel<<<1, 128, 0, stream>>>(pack, device + at, n);
  }
  cuda_throw(cudaGetLastError(), "kernel launch");
}

void cuda_encode(const CudaJob& job, cudaStream_t stream) {
  if (job.items == 0) return;
  if (job.scheme.unit == 0 && job.scheme.stat != Stat::none || job.scheme.body == Body::select && job.scheme.unit == 0)
    cuda_throw(cudaMemsetAsync(job.tops, 0, job.piece_count * sizeof(uint32_t), stream), "memset");
  if (job.scheme.body == Body::select) {
    if (job.feedback)
      encode_selected<true>(job, stream);
    else
      encode_selected<false>(job, stream);
    return;
  }
  if (job.scheme.unit == 0) {
    cuda_throw(cudaMemsetAsync(job.sums, 0, job.piece_count * sizeof(CudaSums), stream), "memset");
    if (job.feedback)
      launch(whole_max<true>, job, job.items, 8, 256, stream);
    else
      launch(whole_max<false>, job, job.items, 8, 256, stream);
    if (job.scheme.stat != Stat::absmax) {
      if (job.feedback)
        launch(whole_sums<true>, job, job.items, 8, 256, stream);
      else
        launch(whole_sums<false>, job, job.items, 8, 256, stream);
    }
    launch(whole_sides, job, job.piece_count, 128, 128, stream);
  }
  EncodeCall call{job, stream};
  with_body(job.scheme, call);
}

void cuda_decode(const CudaJob& job, cudaStream_t stream) {
  if (job.items == 0) return;
  if (job.scheme.body != Body::select) {
    DecodeCall call{job, stream};
    with_body(job.scheme, call);
    return;
  }
  launch(select_fill, job, block_count(job), 8, 256, stream);
  const Grid1 grid;
  const dim3 blocks(job.scheme.unit ? grid.blocks(job.items, 8) : grid.blocks(job.piece_count, 8), job.scheme.unit ? 1 : 64);
  select_scatter<<<blocks, 256, 0, stream>>>(job);
  cuda_throw(cudaGetLastError(), "kernel launch");
}

void cuda_finish_encode(const CudaHead& head, std::byte* message, const unsigned long long* check, cudaStream_t stream) {
  finish_kernel<<<1, 256, 0, stream>>>(head, message, check);
  cuda_throw(cudaGetLastError(), "kernel launch");
}

void cuda_check(const CudaHead& head, const std::byte* message, const unsigned long long* check, uint32_t* status, uint32_t* sticky,
                cudaStream_t stream) {
  check_kernel<<<1, 256, 0, stream>>>(head, message, check, status, sticky);
  cuda_throw(cudaGetLastError(), "kernel launch");
}

void cuda_poison(const CudaJob& job, cudaStream_t stream) {
  if (job.items) launch(poison_kernel, job, job.items, 1, 256, stream);
}

}  // namespace gradwire
