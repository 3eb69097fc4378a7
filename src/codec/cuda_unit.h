// SPDX-License-Identifier: Apache-2.0
// The interface of the codecs with units of their own (unit.h) on a GPU. Plain C++: the runner includes this without
// nvcc.
//
// The tensors of a plan that share a codec and an element type are a group. When a runner is made, it asks the codec
// for a CudaUnitGroup, gives it device memory once, and then calls it in every step. A call only enqueues on the
// stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <span>

#include "device/cuda_job.h"

namespace gradwire {

class CudaUnitGroup {
 public:
  virtual ~CudaUnitGroup() = default;
  virtual size_t bytes() const { return 0; }  // of device memory for tables and workspace
  // `memory` has so many bytes, is aligned to 256, zeroed, and stays until the group is gone. May wait for the stream.
  virtual void place(std::byte* memory, cudaStream_t stream) { (void)memory, (void)stream; }
  virtual void encode(const CudaJob& job, cudaStream_t stream) const = 0;
  virtual void decode(const CudaJob& job, cudaStream_t stream) const = 0;
};

struct CudaUnitOps {
  // `pieces` are the tensors of the group, none of them empty; they are not kept.
  std::unique_ptr<CudaUnitGroup> (*make)(const Scheme& scheme, std::span<const CudaPiece> pieces);
};

}  // namespace gradwire
