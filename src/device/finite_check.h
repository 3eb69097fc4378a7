// SPDX-License-Identifier: Apache-2.0
// The check that the results of a step are finite. A step whose results hold a NaN or an Inf is skipped: it changes no
// residual. On the CPU the answer is known at once. On a GPU the host does not wait for it: the check sets a flag in
// the GPU's memory, and a kernel copies the old residuals back if the flag is set.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "device/memory.h"
#include "gradwire/tensor.h"

namespace gradwire {

struct ResultSpan {
  void* data;
  uint64_t count;
  DType dtype;
};

struct CopySpan {
  const void* from;
  void* to;
  uint64_t count;  // bytes, a multiple of 2
};

class FiniteCheck {
 public:
  explicit FiniteCheck(const Device& device);
  ~FiniteCheck();
  FiniteCheck(const FiniteCheck&) = delete;
  FiniteCheck& operator=(const FiniteCheck&) = delete;

  // `device` names the stream; it must be the device of construction. On a GPU the calls only enqueue, and every f32
  // NaN among the results becomes the NaN that a CPU would have produced.
  void check(const Device& device, std::span<const ResultSpan> results);
  void fail();  // a result that lies elsewhere is not finite; on a GPU it waits
  void copy_if_bad(const Device& device, std::span<const CopySpan> spans);  // to = from if the step is skipped
  void end_step(const Device& device);                                      // counts the step and clears the flag

  bool bad() const;          // whether a result of this step was not finite; waits for a GPU
  bool last_bad() const;     // the same for the step that was ended last
  uint64_t skipped() const;  // steps so far; waits for a GPU

 private:
  std::shared_ptr<Memory> memory_;
  uint32_t* words_;  // the flag, the count, the flag of the step before
};

// cuda_finite_check.cu
void cuda_check_finite(int index, void* stream, std::span<const ResultSpan> results, uint32_t* words);
void cuda_copy_if_bad(int index, void* stream, std::span<const CopySpan> spans, const uint32_t* words);
void cuda_end_check(int index, void* stream, uint32_t* words);

}  // namespace gradwire
