// SPDX-License-Identifier: Apache-2.0
// Work of a GPU's stream that is recorded once and run again with one call, as a CUDA graph. It is for trainings that
// wait for their host: a bucket takes some twenty launches otherwise.
//
// What runs again has the addresses and arguments that were recorded. The one thing that changes from step to step by
// itself is the step, which kernels read from Device::clock. Work of other streams is recorded too, if it follows from
// this stream's and this stream waits for it, such as an exchange of NCCL's.
//
//   Recording recording(device);
//   recording.begin();
//   ...                   // enqueued on the stream by this thread: it is recorded, and does not run
//   recording.end();
//   recording.run();      // enqueues all of it
//
// Threads: a Recording belongs to one thread at a time. Between begin() and end() nothing may wait for the stream.
#pragma once

#include "gradwire/runner.h"

namespace gradwire {

class Recording {
 public:
  explicit Recording(const Device& device);  // Error{unsupported} unless it is a GPU
  ~Recording() { forget(); }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  void begin();
  void end();
  void run();
  void forget();  // at any time, also between begin() and end(): nothing is recorded any more

 private:
  int index_;
  void* stream_;
  bool open_ = false;
  void* graph_ = nullptr;  // cudaGraphExec_t
};

// Sets Device::clock, where there is one. It only enqueues.
void set_clock(const Device& device, uint64_t step);

}  // namespace gradwire
