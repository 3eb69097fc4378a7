// SPDX-License-Identifier: Apache-2.0
// Shows a training run on the console while it runs: one row per epoch and, on a terminal, a progress line that is
// redrawn in place. With --json it prints every event as one line of JSON instead.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "cli/console.h"

namespace gradwire::app {

class ConsoleReporter {
 public:
  explicit ConsoleReporter(bool json);
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
