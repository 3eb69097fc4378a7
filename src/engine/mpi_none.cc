// SPDX-License-Identifier: Apache-2.0
// The MPI engine of a build that found no MPI: it says so, and how to get it.
#include "gradwire/engine.h"
#include "gradwire/error.h"

namespace gradwire {

bool mpi_built() { return false; }

std::unique_ptr<Engine> make_mpi(const void*) {
  throw Error(
      ErrorKind::unsupported,
      "engine mpi is not in this build: install an MPI (on Debian libopenmpi-dev and openmpi-bin) and configure "
      "again with GRADWIRE_MPI=ON",
      "engine");
}

}  // namespace gradwire
