// SPDX-License-Identifier: Apache-2.0
// MPI belongs to the program, not to the library: this session initialises it with the thread level the engine needs
// and finalises it. Without MPI in the build every call says so.
#pragma once

#include <memory>
#include <string>

#include "gradwire/engine.h"

namespace gradwire::app {

class MpiSession {
 public:
  MpiSession();   // Error{unsupported} without MPI, or when it lacks MPI_THREAD_MULTIPLE
  ~MpiSession();  // finalises
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;
  Engine& engine() { return *engine_; }
  // After an error on this rank: the others may be waiting for it, so the job is ended through the launcher.
  [[noreturn]] void abort(int exit_code);

 private:
  std::unique_ptr<Engine> engine_;
};

std::string mpi_library();  // the MPI library's own words, or empty without MPI

}  // namespace gradwire::app
