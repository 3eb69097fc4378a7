// SPDX-License-Identifier: Apache-2.0
// The report of a comparison. Every run is one record, DIR/runs/<name>/run.json. From the records alone come
// DIR/results.csv (one row per run and epoch), DIR/report.html (one page that contains its charts, data and program and
// requests nothing else) and, if asked for, plots for papers. The same records give the same bytes.
//
// Runs that differ in nothing but the seed form one series: a line in a chart, a row in a table. report_run.h has the
// record, and report_series.h has what is computed from it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace gradwire::app {

// The records of all runs in `places`. A place is the folder of a comparison, with runs/<name>/run.json, or that of a
// single run, with run.json, or a record. A folder without any belongs to a run that has not written one yet; it is
// skipped. Error{usage}: a place does not exist, or there is no record. Error{frame}: a record is damaged.
std::vector<nlohmann::json> read_runs(const std::vector<std::string>& places);

// The folder that a report of these places goes to, which is made: `out`, or else the folder of a comparison if that is
// the only place, since a report of anything else belongs to none of the places, or else the current one.
std::string report_folder(const std::vector<std::string>& places, const std::string& out);

// Writes results.csv, report.html and, if asked, the plots into `dir`; each file all or nothing. Returns the names of
// the files. Error{usage}: no runs; Error{frame}: a field is missing or wrong, or one run is there twice;
// Error{unsupported}: plots are asked for and gnuplot is missing (the other files are written by then).
std::vector<std::string> write_report(const std::string& dir, const std::vector<nlohmann::json>& runs, bool plots);

// The first table of the page, for a terminal.
std::string report_table(const std::vector<nlohmann::json>& runs);

// Whether this build found Chart.js. Without it the page has all its tables and says in place of the charts why there
// are none.
bool report_has_charts();

}  // namespace gradwire::app
