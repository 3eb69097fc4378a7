// SPDX-License-Identifier: Apache-2.0
// `gradwire bench`: the group of measuring commands. Each verifies before it times, takes turns between what it
// compares and reports medians. docs/measuring.md defines every figure.
#include <CLI/CLI.hpp>

#include "cli/command.h"

namespace gradwire::app {

void add_bench(CLI::App& app, Action& action) {
  CLI::App* bench = app.add_subcommand("bench", "Measure codecs, threads and collectives");
  bench->require_subcommand(1);
  bench->footer(
      "Example:\n  gradwire bench codec --codec qsgd:bits=4 --elements 16777216\n\n"
      "Every measurement is verified first. docs/measuring.md defines the figures.");
  add_bench_codec(*bench, action);
  add_bench_threads(*bench, action);
  add_bench_collective(*bench, action);
  for (CLI::App* command : bench->get_subcommands({})) command->group("Commands");
}

}  // namespace gradwire::app
