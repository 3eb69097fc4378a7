// SPDX-License-Identifier: Apache-2.0
// A whole run: its workers as threads of this process, or this process as one worker among those of an engine. No torch
// in this header.
#pragma once

#include <atomic>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "train/data.h"
#include "train/settings.h"

namespace gradwire::train {

// What happens, as it happens, on rank 0: {"event": "start" | "step" | "layers" | "epoch" | "saved" | "end", ...}.
using Listener = std::function<void(const nlohmann::json& event)>;

struct Job {
  const Task& task;
  const Settings& settings;
  const Places& places;
  Listener listener;              // may be empty
  const std::atomic<bool>& stop;  // somebody pressed Ctrl-C
};

// Throws before anything is trained where the settings cannot be, on this machine or at all. The record is rank 0's
// (docs/training.md), null on other ranks. `engine`: null for workers as threads.
nlohmann::json run(const Job& job, Engine* engine = nullptr);

}  // namespace gradwire::train
