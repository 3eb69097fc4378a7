// SPDX-License-Identifier: Apache-2.0
// MPI belongs to the program, not to the library. A session initialises it with the thread level that the engine needs,
// and finalises it. In a build without MPI the constructor throws.
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
  // Call it after an error on this rank. Other ranks may be waiting for it, so the launcher ends the whole job.
  [[noreturn]] void abort(int exit_code);

 private:
  std::unique_ptr<Engine> engine_;
};

std::string mpi_library();  // what the MPI library says of itself; empty without MPI

}  // namespace gradwire::app
