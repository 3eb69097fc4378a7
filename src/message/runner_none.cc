// SPDX-License-Identifier: Apache-2.0
// What a build without CUDA says when it is asked for it.
#include "gradwire/error.h"
#include "message/runners.h"

namespace gradwire {

bool cuda_built() { return false; }
int cuda_devices() { return 0; }
std::string cuda_description() { return "not in this build: configure it where nvcc is found"; }

std::unique_ptr<Runner> make_cuda_runner(const Plan&, const Device&) {
  throw Error(ErrorKind::unsupported, "device is cuda, but this build has no CUDA: configure it where nvcc is found",
              "device");
}

}  // namespace gradwire
