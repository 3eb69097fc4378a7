// SPDX-License-Identifier: Apache-2.0
// C++ over the C interface, for programs that move the bytes themselves: every rank encodes its gradient, MPI brings
// all messages to all ranks, and every rank decodes and averages them.
//
//   mpicxx gather_mpi.cpp $(pkg-config --cflags --libs gradwire) -o gather_mpi
//   mpirun -n 2 ./gather_mpi qsgd:bits=4 gradient.f32 gradient.gw
//
// Every rank reads the file of raw 32-bit floats and takes its own number for the seed. With a third argument rank 0
// writes its message there, which has the bytes of
//   gradwire encode --codec qsgd:bits=4 --dtype f32 --seed 0 --step 7 gradient.f32 gradient.gw
#include <gradwire.h>
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

void check(int status) {
  if (status != GW_OK) throw std::runtime_error(gw_error());
}

struct ClosePlan {
  void operator()(gw_plan* plan) const { gw_plan_close(plan); }
};
using PlanPointer = std::unique_ptr<gw_plan, ClosePlan>;

PlanPointer make_plan(const char* codec, size_t count) {
  gw_plan* plan = nullptr;
  check(gw_plan_open(codec, &plan));
  PlanPointer owned(plan);
  check(gw_plan_add(plan, "", GW_F32, count, 1));
  return owned;
}

std::vector<float> read_floats(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  if (bytes.empty()) throw std::runtime_error(std::string(path) + " cannot be read");
  std::vector<float> values(bytes.size() / sizeof(float));
  std::copy_n(bytes.data(), values.size() * sizeof(float), reinterpret_cast<char*>(values.data()));
  return values;
}

void run(const char* codec, const char* in, const char* out) {
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const std::vector<float> gradient = read_floats(in);
  const PlanPointer plan = make_plan(codec, gradient.size());
  const void* tensors[] = {gradient.data()};
  check(gw_plan_fit(plan.get(), tensors));
  size_t bytes = 0;
  check(gw_plan_bytes(plan.get(), &bytes));
  std::vector<char> message(bytes), all(bytes * static_cast<size_t>(size));
  check(gw_encode(plan.get(), tensors, 7, static_cast<uint64_t>(rank), message.data(), bytes, &bytes));

  // The size of a message depends on the codec and the count alone, so all messages here are of one size.
  const int length = static_cast<int>(bytes);
  MPI_Allgather(message.data(), length, MPI_BYTE, all.data(), length, MPI_BYTE, MPI_COMM_WORLD);
  std::vector<float> mean(gradient.size()), one(gradient.size());
  void* decoded[] = {one.data()};
  for (int p = 0; p < size; ++p) {
    check(gw_decode(plan.get(), all.data() + bytes * static_cast<size_t>(p), bytes, decoded));
    for (size_t i = 0; i < mean.size(); ++i) mean[i] += one[i] / static_cast<float>(size);
  }
  if (rank != 0) return;
  double error = 0, norm = 0;
  for (size_t i = 0; i < mean.size(); ++i) {
    error += (mean[i] - gradient[i]) * (mean[i] - gradient[i]);
    norm += gradient[i] * gradient[i];
  }
  std::printf("%s over %d ranks: %zu bytes, fp32 has %zu; error of the mean %.2g\n", codec, size, bytes,
              gradient.size() * sizeof(float), norm > 0 ? error / norm : 0);
  if (out) std::ofstream(out, std::ios::binary).write(message.data(), static_cast<std::streamsize>(bytes));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return std::fprintf(stderr, "usage: gather_mpi CODEC IN [OUT]\n"), 2;
  MPI_Init(&argc, &argv);
  try {
    run(argv[1], argv[2], argc > 3 ? argv[3] : nullptr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}
