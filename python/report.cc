// SPDX-License-Identifier: Apache-2.0
// The report of runs, as the program `gradwire report` writes it (apps/report).
#include "report/report.h"

#include <pybind11/stl.h>

#include <tuple>

#include "bindings.h"

namespace gradwire::python {

void bind_report(py::module_& module) {
  module.def(
      "report",
      [](const std::vector<std::string>& places, const std::string& out, bool plots) {
        const std::vector<nlohmann::json> runs = app::read_runs(places);
        const std::string folder = app::report_folder(places, out);
        std::vector<std::string> files = app::write_report(folder, runs, plots);
        for (std::string& file : files) file = folder + "/" + file;
        return std::make_tuple(app::report_table(runs), files, app::report_has_charts());
      },
      py::arg("places"), py::arg("out"), py::arg("plots"), Unlocked(),
      "Writes the report of all runs in these folders. (A table, the files, whether the page has charts.)");
}

}  // namespace gradwire::python
