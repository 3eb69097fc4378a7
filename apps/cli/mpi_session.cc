// SPDX-License-Identifier: Apache-2.0
// See mpi_session.h. The only file of the program that includes MPI.
#include "cli/mpi_session.h"

#include <cstdlib>

#include "gradwire/error.h"

#ifdef GRADWIRE_HAS_MPI
#include "gradwire/mpi.h"
#endif

namespace gradwire::app {

#ifdef GRADWIRE_HAS_MPI

MpiSession::MpiSession() {
  int level = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  engine_ = make_mpi();
}

MpiSession::~MpiSession() {
  engine_.reset();
  MPI_Finalize();
}

void MpiSession::abort(int exit_code) {
  MPI_Abort(MPI_COMM_WORLD, exit_code);
  std::_Exit(exit_code);
}

std::string mpi_library() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);  // allowed before MPI_Init
  std::string words(text);
  return words.substr(0, words.find_first_of(",\n"));
}

// The interface for tools may be used before MPI_Init, and offers the level that MPI itself does.
std::string mpi_thread_level() {
  int level = MPI_THREAD_SINGLE;
  if (MPI_T_init_thread(MPI_THREAD_MULTIPLE, &level) != MPI_SUCCESS) return {};
  MPI_T_finalize();
  return level >= MPI_THREAD_MULTIPLE     ? "MPI_THREAD_MULTIPLE"
         : level >= MPI_THREAD_SERIALIZED ? "MPI_THREAD_SERIALIZED"
         : level >= MPI_THREAD_FUNNELED   ? "MPI_THREAD_FUNNELED"
                                          : "MPI_THREAD_SINGLE";
}

#else

MpiSession::MpiSession() {
  throw Error(ErrorKind::unsupported, "--engine mpi: this build has no MPI; see gradwire doctor", "engine");
}
MpiSession::~MpiSession() = default;
void MpiSession::abort(int exit_code) { std::_Exit(exit_code); }
std::string mpi_library() { return {}; }
std::string mpi_thread_level() { return {}; }

#endif

}  // namespace gradwire::app
