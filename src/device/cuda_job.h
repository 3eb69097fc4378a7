// SPDX-License-Identifier: Apache-2.0
// What the CUDA kernels are told, and the functions that launch them. Plain C++: the runner includes this without nvcc.
// Everything here only enqueues on a stream; nothing allocates or synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/params.h"
#include "device/scheme.h"
#include "gradwire/plan.h"
#include "gradwire/tensor.h"

namespace gradwire {

// One tensor (or piece) of a group: the tensors of a plan that share scheme and dtype run in one launch.
struct CudaPiece {
  uint64_t count, first_block, name_hash;
  uint64_t region;      // its first word in the body
  uint64_t first_item;  // number of its first item in the group
  uint64_t first_block_slot;  // whole-tensor selection: its first entry in block_counts
  uint32_t tensor;      // its place in the pointer tables
};

struct CudaSums {
  unsigned long long first, second, negative;
};

// The state of choosing the k-th strongest magnitude of a whole tensor, digit by digit.
struct CudaSelect {
  uint32_t prefix, known;
  unsigned long long left;
  uint32_t histogram[2048];
};

// Bits of the status word. Any of them makes wait() throw.
enum CudaStatus : uint32_t {
  kBadCodes = 1, kBadSide = 2, kBadPadding = 4, kBadIndices = 8, kBadValues = 16, kBadHead = 32, kBadBody = 64, kBadStamp = 128,
};

struct CudaJob {
  Scheme scheme;
  DType dtype = DType::f32, residual = DType::f32;
  const CudaPiece* pieces = nullptr;
  const uint32_t* item_piece = nullptr;  // item -> piece
  uint64_t items = 0;                    // blocks, or chunks of 32 blocks (chunked())
  uint32_t piece_count = 0;
  const void* const* in = nullptr;  // device tables of device pointers, by tensor
  void* const* out = nullptr;
  const void* const* before = nullptr;
  void* const* after = nullptr;
  bool feedback = false, add = false;
  float loss_scale = 1, unscale = 1;
  uint64_t call = 0;
  uint32_t* body = nullptr;
  unsigned long long* check = nullptr;  // the body's sum, under way
  uint32_t* status = nullptr;
  // Whole-tensor units, an entry a piece.
  uint32_t* tops = nullptr;
  CudaSums* sums = nullptr;
  UnitParams* params = nullptr;
  CudaSelect* select = nullptr;
  uint2* block_counts = nullptr;  // above and at the threshold, then their prefix sums
};

// Items are blocks, or chunks of 32 blocks where units are larger than a block.
GW_HD inline bool chunked(const Scheme& s) { return s.unit > kBlock; }
// Blocks to visit, seen from the items; the last chunk of a piece may have fewer than 32.
GW_HD inline uint64_t block_count(const CudaJob& job) { return job.items * (chunked(job.scheme) ? 32 : 1); }

struct CudaHead {
  const std::byte* expected;  // device: the head of this plan
  uint32_t bytes;
  uint64_t step;
  uint32_t stage, rank, world;
  uint64_t head_check;  // encode: of the head with this stamp
  uint64_t body_words;
  const uint64_t* gaps;  // device: pairs [from, to) of body words between regions
  uint32_t gap_count;
  bool has_stamp;        // decode: the stamp must be this one
  uint32_t first_tensor_at;  // byte where the tensor table begins
};

void cuda_begin(unsigned long long* check, uint32_t* status_or_null, cudaStream_t stream);
void cuda_pointers(const void* const* host, const void** device, size_t count, cudaStream_t stream);
void cuda_encode(const CudaJob& job, cudaStream_t stream);
void cuda_decode(const CudaJob& job, cudaStream_t stream);
void cuda_finish_encode(const CudaHead& head, std::byte* message, const unsigned long long* check, cudaStream_t stream);
// Sets status bits for a head or sum that is not right, and adds all bits to the sticky word.
void cuda_check(const CudaHead& head, const std::byte* message, const unsigned long long* check, uint32_t* status, uint32_t* sticky,
                cudaStream_t stream);
void cuda_poison(const CudaJob& job, cudaStream_t stream);  // if any bit stands, fills the group's outputs with NaN

void cuda_throw(cudaError_t code, const char* what);  // Error{device} unless it is cudaSuccess

}  // namespace gradwire
