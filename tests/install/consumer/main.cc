// SPDX-License-Identifier: Apache-2.0
// A consumer of the installed package: encodes and decodes a tensor, then averages it among three workers. It touches
// every library of the package (codec, message, engine, collective), so a link line that lacks one does not link.
#include <cmath>
#include <cstdio>
#include <vector>

#include "gradwire/collective.h"
#include "gradwire/runner.h"
#include "gradwire/version.h"

int main() {
  using namespace gradwire;
  std::vector<float> gradient(100'000);
  for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = std::sin(0.01f * static_cast<float>(i));

  Plan plan({{"weight", gradient.size(), DType::f32, Codec::parse("qsgd:bits=8")}});
  auto runner = make_runner(plan, Device{});
  std::vector<std::byte> message(plan.message_bytes());
  const void* in[] = {gradient.data()};
  runner->encode(in, Stamp{.seed = 1, .step = 7}, message);
  std::vector<float> restored(gradient.size());
  void* out[] = {restored.data()};
  runner->decode(message, out);

  // A bucket's scale is its largest magnitude, at most 1, and 8 bits give 127 steps on each side: stochastic rounding
  // is off by less than one step.
  float worst = 0;
  for (size_t i = 0; i < gradient.size(); ++i) worst = std::fmax(worst, std::fabs(gradient[i] - restored[i]));
  if (!(worst <= 1.0f / 127)) return std::printf("encode and decode: off by %g\n", worst), 1;

  float worst_mean[3] = {};
  run_loopback(3, [&](Engine& engine) {
    std::vector<float> mean = gradient;
    all_reduce(engine, mean, "fp32");
    float& off = worst_mean[engine.rank()];
    for (size_t i = 0; i < mean.size(); ++i) off = std::fmax(off, std::fabs(mean[i] - gradient[i]));
  });
  // The mean of three equal values, rounded in a sum of two additions and one division.
  for (float off : worst_mean)
    if (!(off <= 1e-6f)) return std::printf("all-reduce: off by %g\n", off), 1;
  std::printf("gradwire %s: %zu bytes for %zu floats\n", kVersionString.data(), message.size(), gradient.size());
}
