// SPDX-License-Identifier: Apache-2.0
// report.html: report/page.html with its style, its program, Chart.js and the data inserted. The data is the comparison
// as JSON, and the program in the page turns it into text and charts. Text from users (codecs, names of tensors,
// commands) passes through here only as JSON strings with every `<` escaped, so that nothing can end its script
// element. The page inserts it as text, never as markup.
#include <string_view>

#include "core/check.h"
#include "gradwire/error.h"
#include "report/report.h"
#include "report/report_write.h"

namespace gradwire::app {
namespace embedded {  // made by cmake/embed.cmake
extern const std::string_view page_html, page_css, page_js, tables_js, charts_js, draw_js, chart_library;
}
namespace {

using json = nlohmann::ordered_json;

json object_of(const Statistic& s) {
  return {{"mean", s.mean}, {"deviation", s.deviation}, {"least", s.least}, {"most", s.most}, {"count", s.count}};
}

json object_of(const LearnedTable& table) {
  json object = {{"step", table.step},
                 {"direction", table.direction},
                 {"codec", table.codec},
                 {"tensors", table.tensors},
                 {"lines", table.lines}};
  if (!table.levels.empty()) object["levels"] = table.levels;
  return object;
}

json curve_of(const Series& series) {
  json curve = json::array();
  for (const Point& point : series.curve) {
    json seconds = json::array();
    for (const double link : kLinks) seconds.push_back(point.seconds_on(link));
    curve.push_back({{"epoch", point.epoch},
                     {"value", object_of(point.value)},
                     {"step", point.steps},
                     {"bytes", point.bytes},
                     {"seconds", seconds}});
  }
  return curve;
}

json layers_of(const Series& series) {
  json tensors = json::array();
  for (const TensorError& tensor : series.layers.tensors)
    tensors.push_back(
        {{"name", tensor.name}, {"elements", tensor.elements}, {"error", tensor.error}, {"cosine", tensor.cosine}});
  return {{"step", series.layers.step}, {"tensors", tensors}};
}

// Seeds are strings, because numbers in a script are exact only up to 2^53.
json run_of(const Run& run, size_t series) {
  json object = {{"series", series},
                 {"seed", std::to_string(run.seed)},
                 {"finished", run.finished},
                 {"epochs", run.epochs.empty() ? 0 : run.epochs.back().epoch},
                 {"value", run.epochs.empty() ? json() : json(value_of(run.epochs.back(), run.metric))},
                 {"weights", run.weights},
                 {"skipped", run.skipped_steps},
                 {"wall", run.epochs.empty() ? 0 : run.epochs.back().seconds.wall},
                 {"memory",
                  {{"peak", run.memory.peak},
                   {"gradients", run.memory.gradients},
                   {"residuals", run.memory.residuals},
                   {"messages", run.memory.messages}}}};
  if (!run.command.empty()) object["command"] = run.command;
  if (!run.version.empty())
    object["made"] = {{"version", run.version}, {"commit", run.commit}, {"date", run.date}, {"host", run.host}};
  return object;
}

json series_of(const Series& series) {
  json object = {{"label", series.label},
                 {"codec", series.first().codec},
                 {"collective", series.first().collective},
                 {"group", series.group},
                 {"colour", series.colour},
                 {"variant", series.variant},
                 {"partial", series.partial},
                 {"runs", series.runs.size()},
                 {"counted", series.counted.size()},
                 {"final", object_of(series.final_value)},
                 {"reference", series.reference ? json(*series.reference) : json()},
                 {"difference", series.difference ? object_of(*series.difference) : json()},
                 {"target", series.target ? json(*series.target) : json()},
                 {"bits", series.bits},
                 {"ratio", series.ratio},
                 {"bytes", series.bytes},
                 {"pays", {series.pays_fp32, series.pays_half}},
                 {"skipped", series.skipped},
                 {"wall", series.seconds.wall},
                 {"compute",
                  {{"median", series.compute.median},
                   {"least", series.compute.least},
                   {"most", series.compute.most},
                   {"runs", series.compute.runs}}},
                 {"split", {series.seconds.compute, series.seconds.encode, series.seconds.wait, series.seconds.decode}},
                 {"curve", curve_of(series)},
                 {"bits_least", series.bits_least},
                 {"bits_most", series.bits_most},
                 {"bits_change", series.bits_change},
                 {"bits_over_time", series.bits_over_time},
                 {"layers", layers_of(series)},
                 {"tables_seed", std::to_string(series.counted.front()->seed)},
                 {"tables", json::array()},
                 {"settings", json::object()}};
  for (const auto& [name, value] : series.settings) object["settings"][name] = value;
  for (const LearnedTable& table : series.counted.front()->tables) object["tables"].push_back(object_of(table));
  return object;
}

json data_of(const Comparison& comparison) {
  json data = {{"links", kLinks},
               {"varied", comparison.varied},
               {"groups", json::array()},
               {"series", json::array()},
               {"runs", json::array()}};
  for (const RunGroup& group : comparison.groups)
    data["groups"].push_back({{"task", group.task},
                              {"model", group.model},
                              {"metric", name_of(group.metric)},
                              {"variants", group.variants}});
  for (size_t i = 0; i < comparison.series.size(); ++i) {
    data["series"].push_back(series_of(comparison.series[i]));
    for (const Run* run : comparison.series[i].runs) data["runs"].push_back(run_of(*run, i));
  }
  return data;
}

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string result;
  for (size_t at; (at = text.find(from)) != std::string_view::npos; text.remove_prefix(at + from.size()))
    result.append(text.substr(0, at)).append(to);
  return result.append(text);
}

// In a script `</` can only occur in a string or a regular expression, where `<\/` means the same.
std::string script(std::string_view program) { return replaced(program, "</", "<\\/"); }

}  // namespace

bool report_has_charts() { return !embedded::chart_library.empty(); }

std::string page_text(const Comparison& comparison) {
  const std::string data =
      replaced(data_of(comparison).dump(-1, ' ', false, json::error_handler_t::replace), "<", "\\u003c");
  const std::pair<std::string_view, std::string> places[] = {
      {"/*style*/", std::string(embedded::page_css)},
      {"/*data*/", data},
      {"/*chart library*/", script(embedded::chart_library)},
      {"/*program*/", script(embedded::page_js) + script(embedded::tables_js) + script(embedded::charts_js) +
                          script(embedded::draw_js)},
  };
  // Each place is searched behind the previous one, so that inserted content is not searched.
  std::string page;
  std::string_view rest = embedded::page_html;
  for (const auto& [place, content] : places) {
    const size_t at = rest.find(place);
    GW_CHECK(at != std::string_view::npos);
    page.append(rest.substr(0, at)).append(content);
    rest.remove_prefix(at + place.size());
  }
  return page.append(rest);
}

}  // namespace gradwire::app
