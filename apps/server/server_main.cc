// SPDX-License-Identifier: Apache-2.0
// The program `gradwire-server`: the commands that need gRPC. People call them as `gradwire serve`,
// `gradwire status` and `gradwire load`.
#include "cli/program.h"

int main(int argc, char** argv) {
  using namespace gradwire::app;
  return run_program(argc, argv, "Called as gradwire serve, gradwire status and gradwire load.",
                     [](CLI::App& app, Action& action) {
                       add_serve(app, action);
                       add_status(app, action);
                       add_load(app, action);
                     });
}
