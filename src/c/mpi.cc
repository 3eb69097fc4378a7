// SPDX-License-Identifier: Apache-2.0
// The library gradwire_mpi: a communicator of callbacks over the MPI engine, whose protocol, time-outs and thread
// levels it keeps. It is a library of its own, so that C programs without MPI do not load MPI. Between it and
// libgradwire there are only the functions of gradwire.h, and no C++ object passes from one to the other.
#include "gradwire/mpi.h"

#include <cmath>
#include <vector>

#include "c/boundary.h"

namespace gradwire::c_api {
namespace {

int exchange(void* context, const void* const* send, const size_t* send_bytes, void* const* recv,
             const size_t* recv_bytes) {
  return guarded([&] {
    Engine& engine = *static_cast<Engine*>(context);
    std::vector<ConstBytes> outgoing;
    std::vector<Bytes> incoming;
    for (int p = 0; p < engine.size(); ++p) {
      outgoing.emplace_back(static_cast<const std::byte*>(send[p]), send_bytes[p]);
      incoming.emplace_back(static_cast<std::byte*>(recv[p]), recv_bytes[p]);
    }
    engine.all_to_all(outgoing, incoming).wait();
  });
}

void abandon(void* context, const char* why) {
  guarded([&] { static_cast<Engine*>(context)->poison(why); });
}

void close(void* context) { delete static_cast<Engine*>(context); }

// Outside of MPI's lifetime MPI's own functions would end the process, and so would a handle that is none: it is an
// error of MPI_COMM_WORLD, whose handler is asked to return for a moment.
MPI_Comm communicator_of(int handle) {
  int initialised = 0, finalised = 0, between_groups = 0;
  MPI_Initialized(&initialised);
  MPI_Finalized(&finalised);
  if (!initialised || finalised)
    refuse_usage(finalised ? "MPI is finalised already" : "MPI is not initialised: call MPI_Init first",
                 "communicator");
  MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  const MPI_Comm communicator = MPI_Comm_f2c(handle);
  const bool exists = communicator != MPI_Comm{} && communicator != MPI_COMM_NULL &&
                      MPI_Comm_test_inter(communicator, &between_groups) == MPI_SUCCESS;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);
  MPI_Errhandler_free(&handler);
  if (!exists)
    refuse_usage("communicator is no communicator; MPI_Comm_c2f() makes the number that is expected", "communicator");
  if (between_groups)
    refuse_usage("communicator is one between two groups; a group of ranks is needed", "communicator");
  return communicator;
}

}  // namespace
}  // namespace gradwire::c_api

using namespace gradwire;
using namespace gradwire::c_api;

extern "C" int gw_reducer_open_mpi(int communicator, double timeout, const gw_plan* plan, gw_reducer** reducer) {
  std::unique_ptr<Engine> engine;
  gw_communicator callbacks{};
  const int made = guarded([&] {
    *given(reducer, "reducer") = nullptr;
    if (!std::isfinite(timeout) || timeout < 0 || timeout > 3e7)
      refuse_usage("timeout is " + std::to_string(timeout) + "; allowed are 0 to 3e7 seconds", "timeout");
    engine = make_mpi(communicator_of(communicator));
    if (timeout > 0) engine->set_timeout(std::chrono::milliseconds(static_cast<int64_t>(std::ceil(timeout * 1000))));
    callbacks = {.struct_bytes = sizeof callbacks,
                 .rank = engine->rank(),
                 .size = engine->size(),
                 .context = engine.get(),
                 .exchange = exchange,
                 .abandon = abandon,
                 .close = close,
                 .node = engine->node() + 1};
  });
  if (made != GW_OK) return made;
  const int opened = gw_reducer_open(&callbacks, plan, reducer);
  if (opened == GW_OK) engine.release();  // close() deletes it
  return opened;
}
