// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <utility>

#include "device/cuda_job.h"
#include "device/recording.h"
#include "gradwire/error.h"

namespace gradwire {

Recording::Recording(const Device& device) : index_(device.index), stream_(device.stream) {
  if (device.kind != Device::Kind::cuda || !stream_)
    throw Error(ErrorKind::unsupported, "only the work of a GPU's stream can be recorded", "device");
}

// Relaxed: other work of this thread and of others, such as that of torch's allocator, goes on as ever.
void Recording::begin() {
  forget();
  cuda_throw(cudaSetDevice(index_), "cudaSetDevice");
  cuda_throw(cudaStreamBeginCapture(static_cast<cudaStream_t>(stream_), cudaStreamCaptureModeRelaxed),
             "cudaStreamBeginCapture");
  open_ = true;
}

void Recording::end() {
  open_ = false;
  cudaGraph_t recorded = nullptr;
  cudaGraphExec_t graph = nullptr;
  cuda_throw(cudaStreamEndCapture(static_cast<cudaStream_t>(stream_), &recorded), "cudaStreamEndCapture");
  const cudaError_t code = cudaGraphInstantiate(&graph, recorded, 0);
  cudaGraphDestroy(recorded);
  cuda_throw(code, "cudaGraphInstantiate");
  graph_ = graph;
}

void Recording::run() {
  if (!graph_) throw Error(ErrorKind::usage, "nothing is recorded", "recording");
  cuda_throw(cudaSetDevice(index_), "cudaSetDevice");
  cuda_throw(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_), static_cast<cudaStream_t>(stream_)),
             "cudaGraphLaunch");
}

void Recording::forget() {
  if (std::exchange(open_, false)) {
    cudaGraph_t recorded = nullptr;
    cudaStreamEndCapture(static_cast<cudaStream_t>(stream_), &recorded);
    if (recorded) cudaGraphDestroy(recorded);
    cudaGetLastError();  // of what made it end early
  }
  if (graph_) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(std::exchange(graph_, nullptr)));
}

void set_clock(const Device& device, uint64_t step) {
  if (!device.clock) return;
  cuda_throw(cudaSetDevice(device.index), "cudaSetDevice");
  cuda_set_clock(device.clock, step, static_cast<cudaStream_t>(device.stream));
}

}  // namespace gradwire
