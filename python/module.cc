// SPDX-License-Identifier: Apache-2.0
// gradwire._core: the library as the package's Python files see it. What each part binds is said in its own file.
#include "bindings.h"
#include "gradwire/plan.h"
#include "gradwire/runner.h"

PYBIND11_MODULE(_core, module) {
  using namespace gradwire;
  module.doc() = "The library behind the package gradwire; use that, not this.";
  module.attr("version") = GRADWIRE_VERSION;
  python::bind_errors(module);
  python::bind_feedback(module);
  python::bind_codec(module);
  python::bind_message(module);
  python::bind_runner(module);
  python::bind_optim(module);
  python::bind_lowrank(module);
  bind_relay(module);
#ifdef GRADWIRE_HAS_REPORT
  python::bind_report(module);
#endif
  module.def("simd_targets", &simd_targets, "Vector targets of this build that this processor runs, best first.");
  module.def("cuda_built", &cuda_built, "Whether this build has the CUDA drivers.");
  module.def("cuda_devices", &cuda_devices, python::Unlocked(), "Usable GPUs.");
  module.def("cuda_description", &cuda_description, python::Unlocked(), "CUDA, in words.");
}
