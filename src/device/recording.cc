// SPDX-License-Identifier: Apache-2.0
// In a build without CUDA there is nothing to record.
#include "device/recording.h"

#include "device/memory.h"

namespace gradwire {

Recording::Recording(const Device&) { no_cuda(); }
void Recording::begin() { no_cuda(); }
void Recording::end() { no_cuda(); }
void Recording::run() { no_cuda(); }
void Recording::forget() {}
void set_clock(const Device& device, uint64_t) {
  if (device.clock) no_cuda();
}

}  // namespace gradwire
