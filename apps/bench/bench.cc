// SPDX-License-Identifier: Apache-2.0
// `gradwire bench`: the group of measuring commands. Each verifies before it times, interleaves what it compares and
// reports medians; what every number means is docs/measuring.md.
#include <CLI/CLI.hpp>

#include "cli/command.h"

namespace gradwire::app {

void add_bench(CLI::App& app, Action& action) {
  CLI::App* bench = app.add_subcommand("bench", "Measure codecs, threads and collectives; verifies before it times");
  bench->require_subcommand(1);
  bench->footer(
      "Example:\n  gradwire bench codec --codec qsgd:bits=4 --elements 16777216\n\n"
      "What the numbers mean is written in docs/measuring.md.");
  add_bench_codec(*bench, action);
  add_bench_threads(*bench, action);
  add_bench_collective(*bench, action);
  for (CLI::App* command : bench->get_subcommands({})) command->group("Commands");
}

}  // namespace gradwire::app
