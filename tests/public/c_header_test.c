/* SPDX-License-Identifier: Apache-2.0
 *
 * gradwire.h is C99, may be included twice, and has nothing that a pedantic compiler minds. The program encodes and
 * decodes eight floats and is refused once. */
#include "gradwire.h"
#include "gradwire.h"

#include <stdio.h>
#include <string.h>

static int failed(const char *what) {
  fprintf(stderr, "%s: %s\n", what, gw_error());
  return 1;
}

int main(void) {
  const float values[8] = {1, -2, 3, -4, 5, -6, 7, -8};
  float back[8] = {0};
  const void *in[1];
  void *out[1];
  unsigned char message[4096];
  size_t bytes = 0, written = 0;
  gw_info info = {0};
  gw_plan *plan = NULL;
  in[0] = values;
  out[0] = back;
  if (gw_plan_open("fp32", &plan) != GW_OK) return failed("gw_plan_open");
  if (gw_plan_add(plan, "x", GW_F32, 8, 1) != GW_OK) return failed("gw_plan_add");
  if (gw_plan_bytes(plan, &bytes) != GW_OK) return failed("gw_plan_bytes");
  if (gw_encode(plan, in, 7, 1, message, sizeof message, &written) != GW_OK) return failed("gw_encode");
  if (written != bytes) return fprintf(stderr, "%zu bytes written, %zu expected\n", written, bytes), 1;
  info.struct_bytes = sizeof info;
  if (gw_inspect(message, written, 0, &info) != GW_OK) return failed("gw_inspect");
  if (info.count != 8 || info.step != 7 || strcmp(info.codec, "fp32") != 0) return failed("what gw_inspect says");
  if (gw_decode(plan, message, written, out) != GW_OK) return failed("gw_decode");
  if (memcmp(values, back, sizeof values) != 0) return failed("the values differ");
  if (gw_decode(plan, message, written - 1, out) != GW_MESSAGE || !*gw_error()) return failed("a short message");
  gw_plan_close(plan);
  return 0;
}
