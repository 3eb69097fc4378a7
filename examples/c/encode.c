/* SPDX-License-Identifier: Apache-2.0
 *
 * Compresses a file of raw 32-bit floats into a message, and decodes it again to say how far off it is.
 *
 *   cc encode.c $(pkg-config --cflags --libs gradwire) -lm -o encode
 *   ./encode qsgd:bits=4 gradient.f32 gradient.gw
 *
 * Seed 1 and step 7 give the bytes of
 *   gradwire encode --codec qsgd:bits=4 --dtype f32 --seed 1 --step 7 gradient.f32 gradient.gw
 */
#include <gradwire.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void check(int status) {
  if (status == GW_OK) return;
  fprintf(stderr, "gradwire: %s\n", gw_error());
  exit(1);
}

static float *read_floats(const char *path, size_t *count) {
  FILE *file = fopen(path, "rb");
  long bytes = 0;
  float *values = NULL;
  if (!file) return NULL;
  if (fseek(file, 0, SEEK_END) == 0 && (bytes = ftell(file)) >= 0) values = malloc((size_t)bytes + 1);
  *count = (size_t)bytes / sizeof(float);
  rewind(file);
  if (values && fread(values, sizeof(float), *count, file) != *count) {
    free(values);
    values = NULL;
  }
  fclose(file);
  return values;
}

int main(int argc, char **argv) {
  gw_plan *plan;
  size_t count, bytes, i;
  float *values, *back;
  void *message;
  const void *in[1];
  void *out[1];
  double error = 0, norm = 0;
  FILE *file;
  if (argc != 4) return fprintf(stderr, "usage: encode CODEC IN OUT\n"), 2;
  values = read_floats(argv[2], &count);
  if (!values) return fprintf(stderr, "%s cannot be read\n", argv[2]), 1;
  in[0] = values;

  check(gw_plan_open(argv[1], &plan));
  check(gw_plan_add(plan, "", GW_F32, count, 1));
  check(gw_plan_fit(plan, in)); /* codecs that do not learn stay as they are */
  check(gw_plan_bytes(plan, &bytes));
  message = malloc(bytes);
  back = malloc(count * sizeof(float) + 1);
  if (!message || !back) return fprintf(stderr, "there is not enough memory\n"), 1;
  out[0] = back;
  check(gw_encode(plan, in, 7, 1, message, bytes, &bytes));
  check(gw_decode(plan, message, bytes, out));

  for (i = 0; i < count; ++i) {
    error += pow((double)values[i] - back[i], 2);
    norm += pow(values[i], 2);
  }
  printf("%s: %zu bytes for %zu floats, error %.3g\n", argv[1], bytes, count, norm > 0 ? error / norm : 0);
  file = fopen(argv[3], "wb");
  if (!file || fwrite(message, 1, bytes, file) != bytes || fclose(file) != 0)
    return fprintf(stderr, "%s cannot be written\n", argv[3]), 1;
  gw_plan_close(plan);
  free(values);
  free(back);
  free(message);
  return 0;
}
