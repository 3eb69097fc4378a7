// SPDX-License-Identifier: Apache-2.0
// `gradwire report`: turns the records of a comparison into a table, a page and plots. It needs neither the data nor
// torch, so runs made on one machine can be viewed on another.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "cli/command.h"
#include "cli/console.h"
#include "cli/options.h"
#include "report/report.h"

namespace gradwire::app {
namespace {

struct ReportOptions {
  std::string dir, plot;
};

void report(const ReportOptions& options) {
  const std::vector<nlohmann::json> runs = read_runs(options.dir);
  print(report_table(runs) + "\n");
  for (const std::string& name : write_report(options.dir, runs, options.plot == "png"))
    print(fmt::format("wrote {}/{}\n", options.dir, name));
  if (!report_has_charts())
    print(
        "report.html has tables only: this build did not find Chart.js (apt-get install libjs-chart.js, then build "
        "again)\n");
}

}  // namespace

void add_report(CLI::App& app, Action& action) {
  CLI::App* command =
      app.add_subcommand("report", "Write results.csv, report.html and plots for the runs of a comparison");
  auto options = std::make_shared<ReportOptions>();
  add_file(*command, "dir", options->dir, "Folder of a comparison, with files runs/NAME/run.json");
  add_choice(*command, "--plot", options->plot, {"png"}, "Draw plots for papers too (needs gnuplot)");
  command->footer("Example:\n  gradwire report comparison/ --plot png");
  command->callback([&action, options] { action = [options] { report(*options); }; });
}

}  // namespace gradwire::app
