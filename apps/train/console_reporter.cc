// SPDX-License-Identifier: Apache-2.0
// See console_reporter.h.
#include "train/console_reporter.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/clock.h"

namespace gradwire::app {
namespace {

constexpr size_t kLayersShown = 16;

std::string loss(const nlohmann::json& value) {
  return value.is_null() ? "not a number" : fmt::format("{:.4f}", value.get<double>());
}
std::string percent(const nlohmann::json& value) {
  return value.is_null() ? "-" : fmt::format("{:.2f} %", 100 * value.get<double>());
}

std::string clock(double seconds) {
  const auto whole = static_cast<uint64_t>(seconds + 0.5);
  return whole >= 3600 ? fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60)
                       : fmt::format("{}:{:02}", whole / 60, whole % 60);
}

std::string layers_table(nlohmann::json tensors) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return a["error"].is_null() ? false : b["error"].is_null() || a["error"] > b["error"];
  });
  const size_t shown = std::min(tensors.size(), kLayersShown);
  ConsoleTable table("lrrr", {"tensor", "elements", "error", "cosine"});
  for (size_t i = 0; i < shown; ++i) {
    const auto& one = tensors[i];
    const auto figure = [](const nlohmann::json& value) {
      return value.is_null() ? "-" : human_fraction(value.get<double>());
    };
    table.row({one["name"], human_count(one["elements"]), figure(one["error"]), figure(one["cosine"])});
  }
  return table.str() +
         (shown < tensors.size()
              ? fmt::format("... and {} tensors with smaller errors (--json shows all)\n", tensors.size() - shown)
              : "");
}

void print_server(const nlohmann::json& server) {
  print(fmt::format(
      "server: {} up, {} down; {} parts of updates applied, {} came too late and were sent with later ones, {} sent "
      "again after a restart, {} reconnects\n{}\n",
      human_bytes(server["messages_up"].get<double>()), human_bytes(server["messages_down"].get<double>()),
      server["applied"].get<uint64_t>(), server["late"].get<uint64_t>(), server["replayed"].get<uint64_t>(),
      server["reconnects"].get<uint64_t>(),
      server["confirmed"].get<bool>() ? "left in order: the residuals are with the server"
                                      : "left, but the server has not confirmed that it has the residuals"));
}

}  // namespace

ConsoleReporter::ConsoleReporter(bool json) : json_(json) {}

void ConsoleReporter::listen(const nlohmann::json& event) {
  const std::string kind = event["event"];
  if (json_) return print(event.dump() + "\n");
  if (kind == "start") start(event);
  if (kind == "step") step(event);
  if (kind == "epoch") epoch(event);
}

void ConsoleReporter::start(const nlohmann::json& event) {
  epochs_ = event["epochs"];
  const std::string codec = event["codec"], down = event["down"], collective = event["collective"];
  const bool momenta = event["exchange"] == "momenta";
  const std::string way = event["optimizer"] != "qadam"
                              ? fmt::format("{}{} by {}", momenta ? "momenta in " : "", codec, collective)
                          : event["send"] == "weights" ? fmt::format("qadam with {} up, {} down", codec, down)
                                                       : fmt::format("qadam with {} by {}", codec, collective);
  print(fmt::format("{}, {} with {} parameters, {} worker{} x {} samples, {}, {}\n", event["task"].get<std::string>(),
                    event["model"].get<std::string>(), human_count(event["parameters"]), event["workers"].get<int>(),
                    event["workers"] == 1 ? "" : "s", event["batch"].get<int>(), event["device"].get<std::string>(),
                    way));
  if (event.contains("set_aside"))
    print_note(fmt::format("the checkpoint of step {} is damaged and was set aside as {}: {}",
                           event["set_aside"]["step"].get<uint64_t>(), event["set_aside"]["path"].get<std::string>(),
                           event["set_aside"]["why"].get<std::string>()));
  if (event["first_step"] > 0)
    print(fmt::format("going on from step {} of {}\n", event["first_step"].get<uint64_t>(),
                      event["total_steps"].get<uint64_t>()));
  print("epoch    train loss  accuracy   test loss  accuracy   bits/element  sent by one   time\n");
  for (const auto& done : event["epochs_done"]) epoch(done);
}

void ConsoleReporter::step(const nlohmann::json& event) {
  if (clock_seconds() - last_shown_ < 0.1) return;
  last_shown_ = clock_seconds();
  progress_.show(fmt::format(
      "{}epoch {}/{}, loss {}, accuracy {}, {:.3g} bits/element, {} sent, {:.0f} samples/s, {} left", prefix_,
      event["epoch"].get<int>(), epochs_, loss(event["loss"]), percent(event["accuracy"]), event["bits"].get<double>(),
      human_bytes(event["bytes_sent"]), event["samples_per_second"].get<double>(), clock(event["seconds_left"])));
}

void ConsoleReporter::epoch(const nlohmann::json& event) {
  progress_.clear();
  const std::string skipped = event.value("skipped_steps", 0) > 0
                                  ? fmt::format("   {} steps left out (not finite)", event["skipped_steps"].get<int>())
                                  : "";
  print(fmt::format("{:>5}  {:>12}  {:>8}  {:>10}  {:>8}  {:>13.3f}  {:>11}  {:>5}{}\n", event["epoch"].get<int>(),
                    loss(event["train_loss"]), percent(event["train_accuracy"]),
                    // With a server, one worker evaluates; the others have neither number.
                    event["test_loss"].is_null() && event["test_accuracy"].is_null() ? "-" : loss(event["test_loss"]),
                    percent(event["test_accuracy"]), event["bits"].get<double>(), human_bytes(event["bytes_sent"]),
                    clock(event["seconds"]["wall"]), skipped));
  std::fflush(stdout);
}

void ConsoleReporter::print_result(const nlohmann::json& record) {
  if (record["epochs"].empty()) return;
  const nlohmann::json& seconds = record["epochs"].back()["seconds"];
  const auto spent = [&](const char* part) { return human_seconds(seconds[part].get<double>()); };
  if (!record["layers"].empty())
    print(fmt::format("\nhow far the mean that was applied is from the exact one, at step {}:\n{}",
                      record["layers"].back()["step"].get<uint64_t>(),
                      layers_table(record["layers"].back()["tensors"])));
  for (const auto& table : record["tables"])
    for (const auto& line : table["lines"])
      print(fmt::format("learned ({}): {}\n", table["side"].get<std::string>(), line.get<std::string>()));
  const nlohmann::json& memory = record["memory"];
  print(fmt::format(
      "\ntime of one worker: compute {}, encode {}, decode {}; waiting {}; {} passed\n"
      "memory: {} at most in this process; of one worker: gradients {}, residuals {}, messages {}, sums {}\n"
      "weights {}{}\n",
      spent("compute"), spent("encode"), spent("decode"), spent("wait"), spent("wall"), human_bytes(memory["peak"]),
      human_bytes(memory["gradients"]), human_bytes(memory["residuals"]), human_bytes(memory["messages"]),
      human_bytes(memory["sums"]), record["weights"].get<std::string>(),
      record.contains("server") ? "" : ", alike on all workers"));
  if (record.contains("server")) print_server(record["server"]);
}

}  // namespace gradwire::app
