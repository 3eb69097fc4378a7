// SPDX-License-Identifier: Apache-2.0
// MPI belongs to the program, not to the library. A session initialises it with the best thread level that it has, and
// finalises it. In a build without MPI the constructor throws.
#pragma once

#include <memory>
#include <string>

#include "gradwire/engine.h"

namespace gradwire::app {

class MpiSession {
 public:
  MpiSession();   // Error{unsupported} without MPI
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
// The highest thread level that the library offers, such as "MPI_THREAD_MULTIPLE"; empty if it does not say, or without
// MPI. MPI is not started for this, which would take a launcher.
std::string mpi_thread_level();

}  // namespace gradwire::app
