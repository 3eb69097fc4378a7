// SPDX-License-Identifier: Apache-2.0
// Reads a record into a Run. `Fields` is one JSON object together with its path in the record, so that every error
// names the field as a reader of the file would search for it: epochs[2].seconds.wall.
#include "report/report_run.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "gradwire/error.h"

namespace gradwire::app {
namespace {

using nlohmann::json;

constexpr double kAny = std::numeric_limits<double>::max();
constexpr uint64_t kWhole = uint64_t{1} << 53;  // above it, not every program reads a number in JSON as a whole number

[[noreturn]] void refuse(const std::string& field, const json& value, const std::string& expected) {
  std::string shown = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (shown.size() > 60) shown = shown.substr(0, 57) + "...";
  throw Error(ErrorKind::frame, fmt::format("{} is {}; expected {}", field, shown, expected), field);
}

double as_number(const json& value, const std::string& field, double low, double high) {
  if (value.is_number()) {
    const double number = value.get<double>();
    if (std::isfinite(number) && number >= low && number <= high) return number;
  }
  std::string expected = "a number";
  if (high < kAny)
    expected += fmt::format(" from {} to {}", low, high);
  else if (low > -kAny)
    expected += fmt::format(", {} or more", low);
  refuse(field, value, expected);
}

uint64_t as_whole(const json& value, const std::string& field, uint64_t low, uint64_t high) {
  // The parser makes whole numbers unsigned. A program that fills in an int makes them signed.
  if (value.is_number_integer() && (value.is_number_unsigned() || value.get<int64_t>() >= 0)) {
    const uint64_t number = value.get<uint64_t>();
    if (number >= low && number <= high) return number;
  }
  refuse(field, value, fmt::format("a whole number from {} to {}", low, high));
}

std::string as_text(const json& value, const std::string& field) {
  if (!value.is_string() || value.get_ref<const std::string&>().empty()) refuse(field, value, "a text");
  return value.get<std::string>();
}

class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) refuse(where_.empty() ? "the record" : where_, object, "an object");
    if (!where_.empty()) where_ += ".";
  }
  std::string path(const char* name) const { return where_ + name; }
  bool has(const char* name) const { return object_.contains(name); }
  const json& at(const char* name) const {
    const auto found = object_.find(name);
    if (found == object_.end()) throw Error(ErrorKind::frame, fmt::format("{} is missing", path(name)), path(name));
    return *found;
  }
  double number(const char* name, double low = 0, double high = kAny) const {
    return as_number(at(name), path(name), low, high);
  }
  double number_or_nan(const char* name, double low) const {
    return at(name).is_null() ? std::nan("") : as_number(at(name), path(name), low, kAny);
  }
  uint64_t whole(const char* name, uint64_t low = 0, uint64_t high = kWhole) const {
    return as_whole(at(name), path(name), low, high);
  }
  std::string text(const char* name) const { return as_text(at(name), path(name)); }
  bool flag(const char* name) const {
    if (!at(name).is_boolean()) refuse(path(name), at(name), "true or false");
    return at(name).get<bool>();
  }
  // Calls item(value, where) for every entry of a list.
  template <class Item>
  void each(const char* name, Item item) const {
    const json& list = at(name);
    if (!list.is_array()) refuse(path(name), list, "a list");
    for (size_t i = 0; i < list.size(); ++i) item(list[i], fmt::format("{}[{}]", path(name), i));
  }

 private:
  const json& object_;
  std::string where_;
};

RunSeconds parse_seconds(const Fields& in) {
  const Fields seconds(in.at("seconds"), in.path("seconds"));
  return {seconds.number("wall"), seconds.number("compute"), seconds.number("encode"), seconds.number("wait"),
          seconds.number("decode")};
}

Evaluation parse_evaluation(const Fields& in) {
  return {.epoch = in.number("epoch"),
          .step = in.whole("step"),
          .test_loss = in.number_or_nan("test_loss", -kAny),
          .test_accuracy = in.number("test_accuracy", 0, 1),
          .bytes_sent = in.number("bytes_sent"),
          .seconds = parse_seconds(in)};
}

Epoch parse_epoch(const Fields& in) {
  Epoch epoch;
  epoch.epoch = in.whole("epoch", 1);
  epoch.step = in.whole("step");
  epoch.rate = in.number("rate");
  epoch.train_loss = in.number_or_nan("train_loss", -kAny);
  epoch.train_accuracy = in.number("train_accuracy", 0, 1);
  epoch.test_loss = in.number_or_nan("test_loss", -kAny);
  epoch.test_accuracy = in.number("test_accuracy", 0, 1);
  epoch.bytes_sent = in.number("bytes_sent");
  epoch.bits = in.number("bits");
  epoch.seconds = parse_seconds(in);
  return epoch;
}

Measurement parse_measurement(const Fields& in) {
  Measurement measurement{in.whole("step"), {}};
  in.each("tensors", [&](const json& value, const std::string& where) {
    const Fields tensor(value, where);
    measurement.tensors.push_back({tensor.text("name"), tensor.whole("elements"), tensor.number_or_nan("error", 0),
                                   tensor.number_or_nan("cosine", -kAny)});
  });
  return measurement;
}

LearnedTable parse_learned(const Fields& in) {
  LearnedTable table{in.whole("step"), in.text("side"), in.text("codec"), {}, {}, {}};
  in.each("tensors",
          [&](const json& value, const std::string& where) { table.tensors.push_back(as_text(value, where)); });
  in.each("lines", [&](const json& value, const std::string& where) { table.lines.push_back(as_text(value, where)); });
  if (in.has("levels"))
    in.each("levels", [&](const json& value, const std::string& where) {
      table.levels.push_back(as_number(value, where, -kAny, kAny));
    });
  return table;
}

Metric parse_metric(const Fields& in) {
  const std::string name = in.text("metric");
  for (const Metric metric : {Metric::accuracy, Metric::loss, Metric::perplexity})
    if (name == name_of(metric)) return metric;
  refuse(in.path("metric"), in.at("metric"), "accuracy, loss or perplexity");
}

}  // namespace

Run parse_run(const json& record) {
  const Fields in(record, "");
  in.whole("version", 1, 1);
  Run run;
  run.codec = in.text("codec");
  run.canonical = in.text("canonical");
  run.seed = in.whole("seed", 0, std::numeric_limits<uint64_t>::max());
  run.task = in.text("task");
  run.model = in.text("model");
  run.workers = in.whole("workers", 1);
  run.collective = in.text("collective");
  run.device = in.text("device");
  run.machine = in.text("machine");
  run.engine = in.text("engine");
  run.batch = in.whole("batch", 1);
  run.optimizer = in.text("optimizer");
  run.rate = in.number("rate");
  run.schedule = in.text("schedule");
  run.parameters = in.whole("parameters");
  run.finished = in.flag("finished");
  run.weights = in.text("weights");
  run.skipped_steps = in.whole("skipped_steps");
  run.metric = parse_metric(in);
  // What older records do not have.
  const std::pair<const char*, std::string*> texts[] = {{"command", &run.command},
                                                        {"gradwire", &run.version},
                                                        {"commit", &run.commit},
                                                        {"date", &run.date},
                                                        {"host", &run.host}};
  for (const auto& [name, text] : texts)
    if (in.has(name)) *text = in.text(name);
  if (in.has("points"))
    in.each("points", [&](const json& value, const std::string& where) {
      run.points.push_back(parse_evaluation(Fields(value, where)));
    });

  in.each("epochs", [&](const json& value, const std::string& where) {
    run.epochs.push_back(parse_epoch(Fields(value, where)));
    const size_t n = run.epochs.size();
    if (n > 1 && run.epochs[n - 1].epoch <= run.epochs[n - 2].epoch)
      refuse(where + ".epoch", value["epoch"], fmt::format("more than the {} before it", run.epochs[n - 2].epoch));
  });
  if (run.finished && run.epochs.empty()) refuse("epochs", record["epochs"], "at least one, since the run is finished");
  in.each("bits_over_time", [&](const json& value, const std::string& where) {
    if (!value.is_array() || value.size() != 2) refuse(where, value, "a pair of step and bits");
    run.bits_over_time.emplace_back(as_whole(value[0], where + "[0]", 0, kWhole),
                                    as_number(value[1], where + "[1]", 0, kAny));
  });
  in.each("layers", [&](const json& value, const std::string& where) {
    run.layers.push_back(parse_measurement(Fields(value, where)));
  });
  in.each("tables", [&](const json& value, const std::string& where) {
    run.tables.push_back(parse_learned(Fields(value, where)));
  });
  const Fields memory(in.at("memory"), "memory");
  run.memory = {memory.number("peak"), memory.number("gradients"), memory.number("residuals"),
                memory.number("messages")};
  return run;
}

const char* name_of(Metric metric) {
  switch (metric) {
    case Metric::accuracy:
      return "accuracy";
    case Metric::loss:
      return "loss";
    case Metric::perplexity:
      return "perplexity";
  }
  return "";
}

double value_of(const Evaluation& point, Metric metric) {
  switch (metric) {
    case Metric::accuracy:
      return point.test_accuracy;
    case Metric::loss:
      return point.test_loss;
    case Metric::perplexity:
      return std::exp(point.test_loss);
  }
  return std::nan("");
}

double value_of(const Epoch& epoch, Metric metric) {
  return value_of(Evaluation{.test_loss = epoch.test_loss, .test_accuracy = epoch.test_accuracy, .seconds = {}},
                  metric);
}

double ratio_of(const Run& run) {
  if (run.epochs.empty() || run.epochs.back().bytes_sent <= 0) return std::nan("");
  const double workers = static_cast<double>(run.workers);
  const double tensor_bytes = 4 * static_cast<double>(run.parameters);
  const double per_step = run.engine == "server"       ? tensor_bytes
                          : run.collective == "gather" ? (workers - 1) * tensor_bytes
                                                       : 2 * (workers - 1) / workers * tensor_bytes;
  return per_step * static_cast<double>(run.epochs.back().step) / run.epochs.back().bytes_sent;
}

}  // namespace gradwire::app
