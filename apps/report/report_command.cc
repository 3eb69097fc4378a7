// SPDX-License-Identifier: Apache-2.0
// `gradwire report`: turns the records of a comparison into a table, a page and plots. It needs neither the data nor
// torch, so runs made on one machine can be viewed on another.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/console.h"
#include "cli/options.h"
#include "report/report.h"

namespace gradwire::app {
namespace {

struct ReportOptions {
  std::vector<std::string> places;
  std::string out, plot;
};

void report(const ReportOptions& options) {
  const std::vector<nlohmann::json> runs = read_runs(options.places);
  const std::string folder = report_folder(options.places, options.out);
  print(report_table(runs) + "\n");
  for (const std::string& name : write_report(folder, runs, options.plot == "png"))
    print(fmt::format("wrote {}/{}\n", folder, name));
  if (!report_has_charts())
    print(
        "report.html has tables only: this build did not find Chart.js (apt-get install libjs-chart.js, then build "
        "again)\n");
}

}  // namespace

void add_report(CLI::App& app, Action& action) {
  CLI::App* command =
      app.add_subcommand("report", "Write results.csv, report.html and plots for the runs of comparisons");
  auto options = std::make_shared<ReportOptions>();
  command
      ->add_option("dir", options->places, "Folders of comparisons, with files runs/NAME/run.json, or of single runs")
      ->type_name("")
      ->required();
  command->add_option("--out", options->out, "Folder for the report; default: the comparison if one is given, else .")
      ->type_name("DIR");
  add_choice(*command, "--plot", options->plot, {"png"}, "Draw plots for papers too (needs gnuplot)");
  command->footer("Examples:\n  gradwire report comparison/ --plot png\n  gradwire report runs/*");
  command->callback([&action, options] { action = [options] { report(*options); }; });
}

}  // namespace gradwire::app
