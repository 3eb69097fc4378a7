// SPDX-License-Identifier: Apache-2.0
// The program `gradwire-train`: the commands that need libtorch. People call it as `gradwire train` and `gradwire
// compare`.
#include "cli/program.h"

int main(int argc, char** argv) {
  using namespace gradwire::app;
  return run_program(argc, argv, "Called as gradwire train and gradwire compare.", [](CLI::App& app, Action& action) {
    add_train(app, action);
    add_compare(app, action);
  });
}
