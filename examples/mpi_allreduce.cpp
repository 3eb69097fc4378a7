// SPDX-License-Identifier: Apache-2.0
// An all-reduce over MPI, compressed: once in one call, then step after step with error feedback.
//
//   find_package(gradwire), link gradwire::gradwire and MPI::MPI_CXX, then:
//   mpiexec -n 4 ./mpi_allreduce "qsgd:bits=4"           # one level
//   mpiexec -n 4 ./mpi_allreduce "qsgd:bits=4" auto      # two levels: ranks of a machine reduce plainly. Or 2: nodes
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "gradwire/collective.h"
#include "gradwire/mpi.h"

namespace {

// A gradient that differs from rank to rank and from step to step.
std::vector<float> gradient(int rank, uint64_t step) {
  std::vector<float> values(100'000);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = std::sin(0.01f * static_cast<float>(i) + static_cast<float>(rank) + static_cast<float>(step));
  return values;
}

void run(gradwire::Engine& engine, const char* codec, int nodes) {
  std::vector<float> mean = gradient(engine.rank(), 0);
  gradwire::all_reduce(engine, mean, codec);  // in place; nothing is kept for the next call

  // A Reducer keeps what compression leaves out of a step, and adds it to the next one.
  gradwire::Reducer reducer(engine, {{"layer.weight", mean.size()}}, {.up = codec, .nodes = nodes});
  for (uint64_t step = 0; step < 10; ++step) reducer.run(step, gradient(engine.rank(), step), mean);
  if (engine.rank() == 0)
    std::printf("%s over %d ranks: %llu bytes per step, %llu leave the node, fp32 has %zu\n", codec, engine.size(),
                static_cast<unsigned long long>(reducer.message_bytes()),
                static_cast<unsigned long long>(reducer.node_bytes()), mean.size() * sizeof(float));
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  int status = 0;
  try {
    const auto engine = gradwire::make_mpi();  // it ends before MPI does
    const std::string nodes = argc > 2 ? argv[2] : "0";
    run(*engine, argc > 1 ? argv[1] : "qsgd:bits=4",
        nodes == "auto" ? gradwire::ReduceOptions::kAutoNodes : std::stoi(nodes));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    status = 1;
  }
  if (status != 0) MPI_Abort(MPI_COMM_WORLD, status);
  MPI_Finalize();
}
