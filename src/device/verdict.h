// SPDX-License-Identifier: Apache-2.0
// The verdict on a step, kept where its results are. A step whose results hold a NaN or an Inf is skipped: it changes
// no residual. On a processor that is asked and answered at once. On a GPU nobody waits for the answer: the results set
// a flag there, and the residuals are put back there if it is set, while the host goes on as if all were well.
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

struct KeepSpan {
  const void* from;
  void* to;
  uint64_t count;  // bytes, a multiple of 2
};

class Verdict {
 public:
  explicit Verdict(const Device& device);
  ~Verdict();
  Verdict(const Verdict&) = delete;
  Verdict& operator=(const Verdict&) = delete;

  // `device` names the stream; it must be the device of construction. On a GPU the calls only enqueue, and f32 NaNs
  // among the results become the one that a CPU would have.
  void look(const Device& device, std::span<const ResultSpan> results);
  void keep_if_bad(const Device& device, std::span<const KeepSpan> spans);  // to = from, where the step is skipped
  void close(const Device& device);                                         // counts, and forgets for the next step

  bool bad() const;          // of the step that is not closed; on a GPU it waits
  uint64_t skipped() const;  // steps, ever; on a GPU it waits

 private:
  std::shared_ptr<Memory> memory_;
  uint32_t* words_;  // the flag, the count
};

// cuda_verdict.cu
void cuda_look(int index, void* stream, std::span<const ResultSpan> results, uint32_t* words);
void cuda_keep_if_bad(int index, void* stream, std::span<const KeepSpan> spans, const uint32_t* words);
void cuda_close(int index, void* stream, uint32_t* words);

}  // namespace gradwire
