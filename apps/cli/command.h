// SPDX-License-Identifier: Apache-2.0
// A command adds itself to the parser. If the user chooses it, it stores an Action, which run_program() runs after
// parsing. Every error therefore passes through one place, where it becomes one line and an exit code.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

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
  kFailed = 8,
  kInterrupted = 130,  // what shells report for Ctrl-C
};

struct TrainingFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Interrupted {};  // thrown by a command that has stopped because it was asked to

int exit_code_of(const std::exception& error);

const std::vector<std::string>& command_words();                 // how this program was called
std::string quoted_line(const std::vector<std::string>& words);  // for a shell

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
void add_train(CLI::App& app, Action& action);  // these two are commands of gradwire-train
void add_compare(CLI::App& app, Action& action);
void add_serve(CLI::App& app, Action& action);  // these three are commands of gradwire-server
void add_status(CLI::App& app, Action& action);
void add_load(CLI::App& app, Action& action);
// A command of another program, gradwire-<program>, which is started for it.
void add_handover(CLI::App& app, Action& action, const char* program, const char* command, const char* meaning);

}  // namespace gradwire::app
