// SPDX-License-Identifier: Apache-2.0
// What the CUDA kernels are told, and the functions that launch them. Plain C++: the runner includes this without nvcc.
// Everything here only enqueues on a stream; nothing allocates or synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "device/params.h"
#include "device/scheme.h"
#include "gradwire/plan.h"
#include "gradwire/tensor.h"
#include "message/wire_offsets.h"

namespace gradwire {

// One tensor (or piece) of a group: the tensors of a plan that share scheme and dtype run in one launch.
struct CudaPiece {
  uint64_t count, first_block, name_hash;
  uint64_t region;      // its first word in the body
  uint64_t first_item;  // number of its first item in the group
  uint32_t tensor;      // its place in the pointer tables: first_pointer + slot
};

struct CudaSums {
  unsigned long long first, second, negative;
};

// Bits of the status word: what of a message is wrong. Any of them makes wait() throw.
enum CudaStatus : uint32_t {
  kBadCodes = 1,
  kBadScales = 2,
  kBadPadding = 4,
  kBadIndices = 8,
  kBadValues = 16,
  kBadHead = 32,
  kBadBody = 64,
  kBadStamp = 128,
  kBadBitmap = 256,
  kBadBuckets = 512,
};

// What the head of a message must be.
struct CudaHead {
  const std::byte* expected = nullptr;  // device: the head of this plan
  uint32_t bytes = 0;
  uint64_t step = 0;
  uint32_t stage = 0, rank = 0, world = 0;
  const uint64_t* clock = nullptr;  // device: where the step stands; null: it is `step`
  uint64_t head_check = 0;          // encode, without a clock: of the head with this stamp
  uint64_t body_words = 0;
  const uint64_t* gaps = nullptr;  // device: pairs [from, to) of body words between regions
  uint32_t gap_count = 0;
  bool has_stamp = false;                         // decode: the stamp must be this one
  uint32_t first_tensor_at = 0, tensors_end = 0;  // bytes where the tensor table begins and ends
};

struct CudaJob {
  Scheme scheme;
  DType dtype = DType::f32, residual = DType::f32;
  const CudaPiece* pieces = nullptr;
  const uint32_t* item_piece = nullptr;  // item -> piece
  uint64_t items = 0;                    // blocks, or chunks of 32 blocks (chunked())
  uint32_t piece_count = 0;
  uint32_t first_pointer = 0;       // pointer tables are ordered by group, then by slot in the group
  const void* const* in = nullptr;  // device tables of device pointers
  void* const* out = nullptr;
  const void* const* before = nullptr;
  void* const* after = nullptr;
  bool feedback = false, add = false;
  bool tails = false;        // the group has pieces that end in a partial block
  bool aligned = false;      // every tensor of the group is aligned to 16 bytes
  uint32_t main_blocks = 0;  // thread blocks that share the items; one more comes before them if there is a head
  // How warps share the full blocks: each takes `run` neighbours at a time. The first `busy` thread blocks do tails
  // before, so their warps take `aside` fewer.
  uint32_t run = 1, busy = 0, aside = 0;
  uint32_t unit_shift = 0;  // units of one block or more: block >> unit_shift is the unit
  // Of the residual that is added, its decay included, and of the new one.
  float loss_scale = 1, unscale = 1;
  const uint64_t* keys = nullptr;  // tensor_key() of every tensor for this call
  uint32_t mask = 0;               // rank_mask()
  uint32_t* body = nullptr;
  unsigned long long* check = nullptr;  // the body's sum, under way
  uint32_t* status = nullptr;
  CudaHead head;  // decode, in the first job of a message: to be checked on the way
  const std::byte* message = nullptr;
  // Whole-tensor units, an entry per piece.
  uint32_t* tops = nullptr;
  CudaSums* sums = nullptr;
  UnitParams* params = nullptr;
};

// Items are blocks, or chunks of 32 blocks where units are larger than a block.
GW_HD inline bool chunked(const Scheme& s) { return s.unit > kBlock; }
// Units that are whole blocks, or parts of none: the fast kernels take the full blocks of these.
GW_HD inline bool block_wise(const Scheme& s) { return s.scale_words == 0 || s.unit == 0 || s.unit >= kBlock; }
// Blocks to visit, seen from the items; the last chunk of a piece may have fewer than 32.
GW_HD inline uint64_t block_count(const CudaJob& job) { return job.items * (chunked(job.scheme) ? 32 : 1); }

// Starts a call: clears the sums, makes the tensors' keys, and puts `count` addresses into a table on the device.
struct CudaBegin {
  unsigned long long* check = nullptr;
  uint32_t* status = nullptr;   // decode; null: left alone
  uint64_t seed = 0, step = 0;  // encode: what call_key() is made of
  uint32_t stage = 0, rank = 0;
  const uint64_t* clock = nullptr;  // as in CudaHead
  const uint64_t* name_hashes = nullptr;
  uint64_t* keys = nullptr;  // encode; null: none
  uint32_t tensors = 0;
};
void cuda_begin(const CudaBegin& begin, const void* const* host, const void** device, size_t count,
                cudaStream_t stream);
void cuda_encode(const CudaJob& job, cudaStream_t stream);
void cuda_decode(const CudaJob& job, cudaStream_t stream);
void cuda_finish_encode(const CudaHead& head, std::byte* message, const unsigned long long* check, cudaStream_t stream);
// Once the jobs of a message are done: adds to the sticky word, which is the host's memory, what went wrong, and if
// anything did, fills the group's outputs with NaN. `job` may have no items; the first of a message also does the
// adding.
void cuda_finish_decode(const CudaJob& job, uint32_t* sticky, bool first, cudaStream_t stream);
void cuda_check_head(const CudaJob& job, cudaStream_t stream);  // alone, for a message without elements

// Blocks of tensors as f32, feedback added, to memory of the host that the device can write to.
struct CudaPick {
  const void *in, *before;
  uint64_t block, count;
  DType dtype;
};
void cuda_sample(std::span<const CudaPick> picks, DType residual, float loss_scale, float* out, cudaStream_t stream);

// Bytes of the host, to memory of the device. They are arguments of launches, so nothing waits.
void cuda_store(std::byte* to, std::span<const std::byte> from, cudaStream_t stream);

void cuda_set_clock(uint64_t* clock, uint64_t step, cudaStream_t stream);

void cuda_throw(cudaError_t code, const char* what);  // Error{device} unless it is cudaSuccess

}  // namespace gradwire
