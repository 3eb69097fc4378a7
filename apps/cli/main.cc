// SPDX-License-Identifier: Apache-2.0
// The program `gradwire`: its commands. Those that train need libtorch, those of the parameter server gRPC,
// which take a while to load and are not everywhere: they are in programs of their own (train_main.cc, server_main.cc) that
// this one hands over to.
#include "cli/command.h"
#include "cli/program.h"

namespace {

constexpr char kFooter[] =
    "Examples:\n"
    "  gradwire train --codec optquant:bits=3             train a small network on Fashion-MNIST with 4 workers\n"
    "  gradwire serve --checkpoint ps.gwc                 a parameter server; its workers: gradwire train --server "
    "HOST:PORT\n"
    "  gradwire demo                                      see what each codec does to a ResNet-50 gradient\n"
    "  gradwire encode --codec qsgd:bits=4 g.npy g.gw     and back: gradwire decode g.gw back.npy\n"
    "  gradwire COMMAND --help                            options of one command, with an example\n"
    "\n"
    "Exit codes: 0 done, 1 internal error or failed verification, 2 wrong usage, 3 a frame or .npy file is damaged,\n"
    "4 a file cannot be read or written, 5 this build or machine cannot do it, 6 ranks disagree or a rank is lost, or "
    "a server\n"
    "refuses or does not answer, 7 a GPU call failed, 130 stopped by Ctrl-C.";

}  // namespace

int main(int argc, char** argv) {
  using namespace gradwire::app;
  return run_program(argc, argv, kFooter, [](CLI::App& app, Action& action) {
    add_demo(app, action);
    add_handover(app, action, "train", "train", "Train a model with compressed gradients");
    add_handover(app, action, "train", "compare", "Train with several codecs and seeds; write a report");
    add_handover(app, action, "server", "serve", "Run a parameter server");
    add_handover(app, action, "server", "status", "Ask a parameter server how it is");
    add_handover(app, action, "server", "load", "Put load on a parameter server: workers that train nothing");
    add_codecs(app, action);
    add_encode(app, action);
    add_inspect(app, action);
    add_decode(app, action);
    add_bench(app, action);
    add_report(app, action);
    add_doctor(app, action);
  });
}
