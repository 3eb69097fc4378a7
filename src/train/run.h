// SPDX-License-Identifier: Apache-2.0
// A whole run: its workers are threads of this process, or this process is one of the ranks of an engine. This header
// does not need torch.
#pragma once

#include <atomic>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "train/data.h"
#include "train/settings.h"

namespace gradwire::train {

// Called on rank 0 with every event of the run:
// {"event": "start" | "step" | "layers" | "evaluated" | "epoch" | "saved" | "end", ...}.
using Listener = std::function<void(const nlohmann::json& event)>;

struct TrainingJob {
  const Task& task;
  const Settings& settings;
  const RunPlaces& places;
  Listener listener;              // may be empty
  const std::atomic<bool>& stop;  // set by Ctrl-C: the run saves and ends
};

// Throws before the training begins if the settings are refused, in general or on this machine. Returns the record of
// the run (docs/training.md) on rank 0, and null on the other ranks. Without an engine the workers are threads.
nlohmann::json run(const TrainingJob& job, Engine* engine = nullptr);

}  // namespace gradwire::train
