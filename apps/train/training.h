// SPDX-License-Identifier: Apache-2.0
// What `train` and `compare` share: their options, where workers run, Ctrl-C, and how a run shows itself.
#pragma once

#include <CLI/CLI.hpp>
#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "cli/console.h"
#include "cli/interrupts.h"
#include "gradwire/engine.h"
#include "train/run.h"

namespace gradwire::app {

struct TrainingOptions {
  train::Settings settings;
  train::Places places;
  train::ServerPlace server;  // its address is empty without one
  std::string engine = "loopback";
  bool json = false;
  CLI::App* command = nullptr;  // to see what the user gave
};

void add_training(CLI::App& command, TrainingOptions& options);
// What the user left open: the model that suits the task, the optimiser that suits the model.
void fill_in(TrainingOptions& options);

// Runs `body` with the engine of mpirun, or with null for workers as threads. Errors of one process end all of them.
void with_engine(const TrainingOptions& options, const std::function<void(Engine*)>& body);

// Shows a run as it goes: a row an epoch, a progress line on a terminal; or all events as JSON lines.
class Narrator {
 public:
  explicit Narrator(bool json);
  void listen(const nlohmann::json& event);
  void prefix(const std::string& text) { prefix_ = text; }  // before the progress line: which run of how many
  static void print_result(const nlohmann::json& record);

 private:
  void start(const nlohmann::json& event);
  void step(const nlohmann::json& event);
  void epoch(const nlohmann::json& event);

  bool json_;
  std::string prefix_;
  int epochs_ = 0;
  double last_shown_ = 0;
  Progress progress_;
};

}  // namespace gradwire::app
