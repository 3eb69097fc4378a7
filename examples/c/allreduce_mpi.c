/* SPDX-License-Identifier: Apache-2.0
 *
 * A compressed all-reduce over MPI, step after step with error feedback.
 *
 *   mpicc allreduce_mpi.c $(pkg-config --cflags --libs gradwire_mpi) -lm -o allreduce_mpi
 *   mpirun -n 4 ./allreduce_mpi onebit
 *
 * MPI_Init() is enough. With MPI_Init_thread() and MPI_THREAD_MULTIPLE a rank that is busy still answers its peers.
 */
#include <gradwire.h>
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static void check(int status) {
  if (status == GW_OK) return;
  fprintf(stderr, "gradwire: %s\n", gw_error());
  MPI_Abort(MPI_COMM_WORLD, status);
}

int main(int argc, char **argv) {
  const char *codec = argc > 1 ? argv[1] : "onebit";
  const size_t count = argc > 2 ? strtoul(argv[2], NULL, 10) : 100000;
  const int steps = 50;
  float *gradient = malloc(count * sizeof(float)), *mean = malloc(count * sizeof(float));
  double *sent = calloc(count, sizeof(double)), error = 0, norm = 0, seconds = 0;
  const void *in[1];
  void *out[1];
  gw_plan *plan;
  gw_reducer *reducer;
  uint64_t bytes;
  int rank, size, step, p;
  size_t i;
  in[0] = gradient;
  out[0] = mean;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);

  check(gw_plan_open(codec, &plan));
  check(gw_plan_add(plan, "layer.weight", GW_F32, count, 2));
  check(gw_reducer_open_mpi(MPI_Comm_c2f(MPI_COMM_WORLD), 0, plan, &reducer));
  check(gw_reducer_set(reducer, "seed", "1"));
  for (i = 0; i < count; ++i) gradient[i] = (float)sin(0.01 * (double)i + rank);
  for (step = 0; step < steps; ++step) {
    seconds -= MPI_Wtime();
    check(gw_reducer_run(reducer, (uint64_t)step, in, out));
    seconds += MPI_Wtime();
    for (i = 0; i < count; ++i) sent[i] += mean[i];
  }
  check(gw_reducer_get(reducer, "message_bytes", &bytes));

  /* Error feedback sends later what compression left out, so the mean over all steps is close to the exact one. */
  for (i = 0; i < count; ++i) {
    double exact = 0;
    for (p = 0; p < size; ++p) exact += sin(0.01 * (double)i + p) / size;
    error += pow(sent[i] / steps - exact, 2);
    norm += exact * exact;
  }
  if (rank == 0)
    printf("%s over %d ranks: %llu bytes per step, fp32 has %zu; %.3g ms per step; error of the mean over %d steps %.2g\n",
           codec, size, (unsigned long long)bytes, count * sizeof(float), seconds / steps * 1000, steps, error / norm);
  gw_reducer_close(reducer); /* before MPI_Finalize */
  gw_plan_close(plan);
  MPI_Finalize();
  return error / norm < 0.01 ? 0 : 1;
}
