// SPDX-License-Identifier: Apache-2.0
// Records are read and reports are written here: see report.h.
#include "report/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <span>

#include "cli/console.h"
#include "cli/files.h"
#include "gradwire/error.h"
#include "report/report_write.h"

namespace gradwire::app {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

json read_record(const std::string& path) {
  const std::vector<std::byte> content = read_file(path);
  const char* text = reinterpret_cast<const char*>(content.data());
  try {
    return json::parse(text, text + content.size());
  } catch (const json::exception& error) {
    std::string why = error.what();
    const size_t bracket = why.find("] ");  // the library's own name and number of the error come first
    if (bracket != std::string::npos) why = why.substr(bracket + 2);
    throw Error(ErrorKind::frame, path + ": not JSON: " + why, "json");
  }
}

std::vector<Run> parse(const std::vector<json>& records) {
  std::vector<Run> runs;
  for (size_t i = 0; i < records.size(); ++i)
    runs.push_back(named(fmt::format("run {} of {}", i + 1, records.size()), [&] { return parse_run(records[i]); }));
  return runs;
}

std::string value_text(double value, Metric metric) {
  if (std::isnan(value)) return "-";
  return metric == Metric::accuracy ? fmt::format("{:.2f} %", 100 * value) : fmt::format("{:.4f}", value);
}

// The records of a comparison, sorted by the names of their folders, that of a single run, or a record itself.
std::vector<std::string> records_of(const fs::path& place) {
  std::error_code failed;
  const fs::file_status status = fs::status(place, failed);
  if (!fs::exists(status))
    throw Error(ErrorKind::usage, fmt::format("{}: no runs; expected an existing folder with run.json", place.string()),
                "dir");
  if (!fs::is_directory(status)) return {place.string()};
  if (fs::exists(place / "run.json", failed)) return {(place / "run.json").string()};
  std::vector<std::string> paths;
  for (fs::directory_iterator entry(place / "runs", failed), end; !failed && entry != end; entry.increment(failed)) {
    const fs::path path = entry->path() / "run.json";
    std::error_code ignored;
    if (fs::exists(path, ignored)) paths.push_back(path.string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// Table counts bytes, so a character beyond ASCII in a label would shift the columns of its row.
std::string ascii(std::string label) {
  for (size_t at; (at = label.find("\u00b7")) != std::string::npos;) label.replace(at, 2, "/");
  return label;
}

}  // namespace

std::string report_folder(const std::vector<std::string>& places, const std::string& out) {
  const bool comparison =
      places.size() == 1 && fs::is_directory(places[0]) && !fs::exists(fs::path(places[0]) / "run.json");
  const std::string folder = !out.empty() ? out : comparison ? places[0] : ".";
  std::error_code failed;
  fs::create_directories(folder, failed);
  if (failed) throw Error(ErrorKind::io, fmt::format("{}: {}", folder, failed.message()), "out");
  return folder;
}

std::vector<json> read_runs(const std::vector<std::string>& places) {
  std::vector<json> records;
  for (const std::string& place : places)
    for (const std::string& path : records_of(place)) {
      records.push_back(read_record(path));
      named(path, [&] { return parse_run(records.back()); });
    }
  if (records.empty()) {
    const std::string& first = places.front();
    throw Error(
        ErrorKind::usage,
        fmt::format("{}: no runs; expected files like {}/runs/NAME/run.json or {}/run.json", first, first, first),
        "dir");
  }
  return records;
}

std::vector<std::string> write_report(const std::string& dir, const std::vector<json>& records, bool plots) {
  const std::vector<Run> runs = parse(records);
  const Comparison comparison = compare_runs(runs);
  std::vector<std::string> names;
  const auto add = [&](const std::string& name, const std::string& content) {
    write_file((fs::path(dir) / name).string(), content);
    names.push_back(name);
  };
  add("results.csv", csv_text(runs));
  add("report.html", page_text(comparison));
  if (plots)
    for (const Plot& plot : draw_plots(comparison)) add(plot.name, plot.content);
  return names;
}

std::string report_table(const std::vector<json>& records) {
  const std::vector<Run> runs = parse(records);
  const Comparison comparison = compare_runs(runs);
  std::string text;
  for (const RunGroup& group : comparison.groups) {
    if (comparison.groups.size() > 1)
      text += fmt::format("{}{}, {}\n", text.empty() ? "" : "\n", group.task, group.model);
    ConsoleTable table("lrrrrrrlr", {"codec", std::string("test ") + name_of(group.metric), "spread", "from fp32",
                                     "bits", "ratio", "sent", "collective", "time"});
    const double unit = group.metric == Metric::accuracy ? 100 : 1;
    for (size_t index : group.series) {
      const Series& series = comparison.series[index];
      const Statistic& final_value = series.final_value;
      const bool some = final_value.count > 0;
      table.row({ascii(series.label) + (series.partial ? " (unfinished)" : ""),
                 value_text(final_value.mean, group.metric),
                 final_value.count > 1 ? fmt::format("{:.2f}", unit * final_value.deviation) : "-",
                 series.difference ? fmt::format("{:+.2f}", unit * series.difference->mean) : "-",
                 some ? fmt::format("{:.2f}", series.bits) : "-",
                 std::isfinite(series.ratio) ? fmt::format("{:.1f}x", series.ratio) : "-",
                 some ? human_bytes(series.bytes) : "-", series.first().collective,
                 some ? human_seconds(series.seconds.wall) : "-"});
    }
    text += table.str();
  }
  return text;
}

}  // namespace gradwire::app
