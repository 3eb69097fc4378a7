// SPDX-License-Identifier: Apache-2.0
// What `train` and `compare` share: their options, the defaults that follow from other options, and the engine.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "cli/interrupts.h"
#include "gradwire/engine.h"
#include "train/run.h"

namespace gradwire::app {

struct TrainingOptions {
  train::Settings settings;
  train::RunPlaces places;
  train::ServerPlace server;  // its address is empty without one
  std::string engine = "loopback";
  bool json = false;
  CLI::App* command = nullptr;  // to see what the user gave
};

void add_training(CLI::App& command, TrainingOptions& options);
// What the user left open: the model that suits the task, the optimiser that suits the model.
void fill_in(TrainingOptions& options);

// In words, why a record says that its training failed.
std::string failure_of(const nlohmann::json& record);

// Runs `body` with the engine of mpirun, or with null for workers as threads. Errors of one process end all of them.
void with_engine(const TrainingOptions& options, const std::function<void(Engine*)>& body);

}  // namespace gradwire::app
