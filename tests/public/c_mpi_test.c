/* SPDX-License-Identifier: Apache-2.0
 *
 * gw_reducer_open_mpi() with what no program should pass to it, then a step, and a step that one rank gets wrong. MPI is
 * initialised with the lowest thread level. Run it with 2 ranks. */
#include "gradwire.h"

#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <string.h>

static int failures = 0;

/* The code must be this one, and its words must have `text` in them. */
static void expect(int code, int expected, const char *text, const char *what) {
  if (code == expected && (expected == GW_OK || strstr(gw_error(), text))) return;
  fprintf(stderr, "%s: code %d in place of %d; '%s' is expected in '%s'\n", what, code, expected, text, gw_error());
  ++failures;
}

static void wrong_arguments(const gw_plan *plan, int rank) {
  const int world = MPI_Comm_c2f(MPI_COMM_WORLD);
  const int handles[] = {-1, -2147483647 - 1, 2147483647, 123456789};
  gw_reducer *reducer = NULL;
  MPI_Comm alone, between, gone;
  size_t i;
  for (i = 0; i < 4; ++i)
    expect(gw_reducer_open_mpi(handles[i], 0, plan, &reducer), GW_USAGE, "no communicator", "a number");
  expect(gw_reducer_open_mpi(MPI_Comm_c2f(MPI_COMM_NULL), 0, plan, &reducer), GW_USAGE, "no communicator", "null");
  MPI_Comm_dup(MPI_COMM_WORLD, &gone);
  i = (size_t)MPI_Comm_c2f(gone);
  MPI_Comm_free(&gone);
  expect(gw_reducer_open_mpi((int)i, 0, plan, &reducer), GW_USAGE, "no communicator", "a communicator that was freed");
  MPI_Comm_split(MPI_COMM_WORLD, rank, 0, &alone);
  MPI_Intercomm_create(alone, 0, MPI_COMM_WORLD, 1 - rank, 5, &between);
  expect(gw_reducer_open_mpi(MPI_Comm_c2f(between), 0, plan, &reducer), GW_USAGE, "two groups", "between two groups");
  MPI_Comm_free(&between);
  MPI_Comm_free(&alone);
  expect(gw_reducer_open_mpi(world, -1, plan, &reducer), GW_USAGE, "timeout", "a negative timeout");
  expect(gw_reducer_open_mpi(world, (double)NAN, plan, &reducer), GW_USAGE, "timeout", "a timeout that is no number");
  expect(gw_reducer_open_mpi(world, 1e300, plan, &reducer), GW_USAGE, "timeout", "an endless timeout");
  expect(gw_reducer_open_mpi(world, 0, plan, NULL), GW_USAGE, "reducer", "no place for the reducer");
  expect(gw_reducer_open_mpi(world, 0, NULL, &reducer), GW_USAGE, "plan", "no plan");
}

/* Both ranks run on this machine, so nothing leaves their node. */
static void on_one_node(const gw_plan *plan, const void *const *in, void *const *out, const float *mean) {
  gw_reducer *reducer = NULL;
  uint64_t left = 1;
  expect(gw_reducer_open_mpi(MPI_Comm_c2f(MPI_COMM_WORLD), 20, plan, &reducer), GW_OK, "", "gw_reducer_open_mpi");
  expect(gw_reducer_set(reducer, "nodes", "auto"), GW_OK, "", "nodes = auto");
  expect(gw_reducer_run(reducer, 0, in, out), GW_OK, "", "a step on one node");
  expect(gw_reducer_get(reducer, "node_bytes", &left), GW_OK, "", "node_bytes");
  if (left != 0 || mean[0] != 0.5f || mean[2] != -2) expect(-1, 0, "", "the mean on one node");
  gw_reducer_close(reducer);
}

int main(int argc, char **argv) {
  float gradient[3], mean[3] = {0, 0, 0};
  const void *in[1];
  void *out[1];
  int rank, level;
  gw_plan *plan = NULL;
  gw_reducer *reducer = NULL;
  in[0] = gradient;
  out[0] = mean;
  expect(gw_plan_open("fp32", &plan), GW_OK, "", "gw_plan_open");
  expect(gw_plan_add(plan, "bias", GW_F32, 3, 1), GW_OK, "", "gw_plan_add");
  expect(gw_reducer_open_mpi(0, 0, plan, &reducer), GW_USAGE, "not initialised", "before MPI_Init");
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SINGLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  wrong_arguments(plan, rank);

  gradient[0] = (float)rank;
  gradient[1] = 2;
  gradient[2] = -4.0f * (float)rank;
  expect(gw_reducer_open_mpi(MPI_Comm_c2f(MPI_COMM_WORLD), 20, plan, &reducer), GW_OK, "", "gw_reducer_open_mpi");
  expect(gw_reducer_run(reducer, 0, in, out), GW_OK, "", "gw_reducer_run");
  if (mean[0] != 0.5f || mean[1] != 2 || mean[2] != -2) expect(-1, 0, "", "the mean");
  expect(gw_reducer_run(reducer, 1, rank == 1 ? NULL : in, out), rank == 1 ? GW_USAGE : GW_MISMATCH, "in is null",
         "a step without input on rank 1");
  expect(gw_reducer_run(reducer, 1, in, out), GW_OK, "", "the step after it");
  gw_reducer_close(reducer);
  on_one_node(plan, in, out, mean);
  MPI_Finalize();
  expect(gw_reducer_open_mpi(0, 0, plan, &reducer), GW_USAGE, "finalised", "after MPI_Finalize");
  gw_plan_close(plan);
  return failures ? 1 : 0;
}
