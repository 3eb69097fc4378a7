// SPDX-License-Identifier: Apache-2.0
// The engine over MPI, for builds that found MPI (mpi_built() in engine.h). This is the only header that includes
// <mpi.h>; a program that uses it links MPI::MPI_CXX too, and the MPI library must be the one that gradwire was built
// with.
//
//   int level;
//   MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
//   {
//     auto engine = gradwire::make_mpi();
//     gradwire::all_reduce(*engine, gradient, "qsgd:bits=4");
//   }
//   MPI_Finalize();
#pragma once

// The C++ bindings of MPI were removed from the standard; where headers still have them, they only warn.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

#include <memory>

#include "gradwire/engine.h"

namespace gradwire {

// Collective over `communicator`, which is duplicated. MPI must be initialised, and is never finalised here: the engine
// must be destroyed before MPI_Finalize. All ranks should have the same thread level.
//
// With MPI_THREAD_MULTIPLE the engine has a thread of its own for progress and time-outs, and its calls follow the rule
// of engine.h. With a lower level it stays on the thread that made it, which MPI_THREAD_FUNNELED and MPI_THREAD_SINGLE
// want to be the main thread (else this throws Error{unsupported}). Bytes then move, and a failure of a peer is
// noticed, only while that thread is inside a call of an engine, and nothing overlaps with the program's own work. With
// MPI_THREAD_SERIALIZED the program sees to it that no other thread is inside MPI meanwhile.
std::unique_ptr<Engine> make_mpi(MPI_Comm communicator = MPI_COMM_WORLD);

}  // namespace gradwire
