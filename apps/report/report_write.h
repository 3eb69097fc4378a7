// SPDX-License-Identifier: Apache-2.0
// The three forms of a report, each made in memory from the same comparison.
#pragma once

#include <string>
#include <vector>

#include "report/report_series.h"

namespace gradwire::app {

std::string csv_text(const std::vector<Run>& runs);

std::string page_text(const Comparison& comparison);

struct Plot {
  std::string name;     // of the file
  std::string content;  // PNG
};
std::vector<Plot> draw_plots(const Comparison& comparison);

}  // namespace gradwire::app
