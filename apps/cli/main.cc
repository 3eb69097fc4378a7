// SPDX-License-Identifier: Apache-2.0
// The program `gradwire` and its commands. Those that train need libtorch and those of the parameter server need gRPC.
// Both libraries take a while to load and are not installed everywhere, so these commands are in programs of their own
// (train_main.cc, server_main.cc), which this one starts.
#include <CLI/CLI.hpp>

#include "cli/command.h"
#include "cli/program.h"

namespace {

constexpr char kFooter[] =
    "Examples:\n"
    "  gradwire train --codec optquant:bits=3             train a small network on Fashion-MNIST with 4 workers\n"
    "  gradwire serve --checkpoint ps.gwc                 run a parameter server\n"
    "  gradwire train --server HOST:PORT                  a worker of that server\n"
    "  gradwire demo                                      see what each codec does to the gradients of ResNet-50\n"
    "  gradwire encode --codec qsgd:bits=4 g.npy g.gw     and back: gradwire decode g.gw back.npy\n"
    "  gradwire help COMMAND                              show the options of one command, with an example\n"
    "\n"
    "Exit codes:\n"
    "  0  done\n"
    "  1  internal error, or a verification failed\n"
    "  2  wrong usage\n"
    "  3  a message or an input file is damaged\n"
    "  4  a file cannot be read or written\n"
    "  5  this build or this machine cannot do it\n"
    "  6  ranks disagree, a rank is lost, or a server refuses or does not answer\n"
    "  7  a GPU call failed\n"
    "  8  a training failed: most of its steps were left out, because their results were not finite\n"
    "  130  stopped by Ctrl-C";

// The two commands are listed for the help page. run_program() rewrites them into --help and --version.
void add_help_and_version(CLI::App& app) {
  app.add_subcommand("help", "Show this page, or the page of a command");
  app.add_subcommand("version", "Print the version and the commit");
}

}  // namespace

int main(int argc, char** argv) {
  using namespace gradwire::app;
  return run_program(argc, argv, kFooter, [](CLI::App& app, Action& action) {
    add_demo(app, action);
    add_handover(app, action, "train", "train", "Train a model with compressed gradients");
    add_handover(app, action, "train", "compare", "Train with several codecs and seeds, and write a report");
    add_handover(app, action, "server", "serve", "Run a parameter server");
    add_handover(app, action, "server", "status", "Show the state of a parameter server");
    add_handover(app, action, "server", "load", "Put load on a parameter server with workers that do not train");
    add_codecs(app, action);
    add_encode(app, action);
    add_inspect(app, action);
    add_decode(app, action);
    add_bench(app, action);
    add_report(app, action);
    add_doctor(app, action);
    add_help_and_version(app);
  });
}
