// SPDX-License-Identifier: Apache-2.0
// A command adds itself to the parser and, when it is the one the user chose, leaves an Action behind. main() runs the
// action after parsing, so that every error of the work goes through one place and becomes one line and an exit code.
#pragma once

#include <functional>
#include <string>

namespace CLI {
class App;
}

namespace gradwire::app {

// Exit codes, as the footer of `gradwire --help` explains them.
enum Exit : int {
  kOk = 0,
  kInternal = 1,
  kUsage = 2,
  kBadInput = 3,
  kIo = 4,
  kUnsupported = 5,
  kPeers = 6,
  kDevice = 7,
  kInterrupted = 130,  // as shells say it of Ctrl-C
};

struct Interrupted {};  // thrown by a command that was asked to stop, and has

int exit_code_of(const std::exception& error);

std::string command_line();  // as this program was called, for records: quoted for a shell

using Action = std::function<void()>;

void add_codecs(CLI::App& app, Action& action);
void add_encode(CLI::App& app, Action& action);
void add_inspect(CLI::App& app, Action& action);
void add_decode(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_bench_codec(CLI::App& bench, Action& action);
void add_bench_threads(CLI::App& bench, Action& action);
void add_bench_collective(CLI::App& bench, Action& action);
void add_doctor(CLI::App& app, Action& action);
void add_demo(CLI::App& app, Action& action);
void add_report(CLI::App& app, Action& action);
void add_train(CLI::App& app, Action& action);  // gradwire-train has these two
void add_compare(CLI::App& app, Action& action);
void add_serve(CLI::App& app, Action& action);  // gradwire-server has these three
void add_status(CLI::App& app, Action& action);
void add_load(CLI::App& app, Action& action);
// A command that another program has: gradwire-<program>.
void add_handover(CLI::App& app, Action& action, const char* program, const char* command, const char* meaning);

}  // namespace gradwire::app
