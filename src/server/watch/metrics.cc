// SPDX-License-Identifier: Apache-2.0
// One `Family` per metric: HELP, TYPE, then its samples, all in one place, as the format asks. Names and units:
// gradwire_, or process_ for what every server has, seconds and bytes, counters end in _total. Label values come from
// workers and are hostile until escaped.
#include "server/watch/metrics.h"

#include <fmt/format.h>

#include <cmath>
#include <set>
#include <vector>

#include "server/watch/watch_status.h"

namespace gradwire::server {
namespace {

using nlohmann::json;
using Labels = std::vector<std::pair<std::string_view, std::string>>;

std::string text_at(const json& from, const char* name) {
  const json& value = at(from, {name});
  return value.is_string() ? value.get<std::string>() : std::string();
}

std::string escaped(const std::string& value) {
  std::string text;
  for (const char c : value) {
    if (c == '\\')
      text += "\\\\";
    else if (c == '"')
      text += "\\\"";
    else if (c == '\n')
      text += "\\n";
    else if (c != '\r' && c != '\0')                                      // some readers end a line at \r
      text += static_cast<unsigned char>(c) < ' ' || c == 127 ? '?' : c;  // and some print to a terminal
  }
  return text;
}

class Family {
 public:
  Family(std::string& out, const char* type, const char* name, const char* help) : out_(out), name_(name) {
    head_ = fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
  }

  Family& sample(const json& value, const Labels& labels = {}, const char* suffix = "") {
    std::string number;
    if (value.is_number_unsigned())
      number = fmt::format("{}", value.get<uint64_t>());
    else if (value.is_number_integer())
      number = fmt::format("{}", value.get<int64_t>());
    else if (value.is_number_float() && std::isfinite(value.get<double>()))
      number = fmt::format("{}", value.get<double>());
    else
      return *this;
    out_ += head_ + name_ + suffix;
    head_.clear();
    for (size_t i = 0; i < labels.size(); ++i)
      out_ += fmt::format("{}{}=\"{}\"", i == 0 ? "{" : ",", labels[i].first, escaped(labels[i].second));
    out_ += labels.empty() ? " " : "} ";
    out_ += number + "\n";
    return *this;
  }

 private:
  std::string& out_;
  std::string head_, name_;
};

void workers(std::string& out, const json& status) {
  struct Here {
    const json* worker;
    Labels labels;
  };
  std::vector<Here> here;
  std::set<std::pair<std::string, std::string>> seen;  // a series that is there twice would spoil the whole answer
  const json& list = at(status, {"workers", "list"});
  if (list.is_array())
    for (const json& worker : list) {
      const std::string state = text_at(worker, "state"), id = text_at(worker, "id"), name = text_at(worker, "name");
      if ((state == "present" || state == "lagging") && seen.emplace(escaped(id), escaped(name)).second)
        here.push_back({&worker, {{"id", id}, {"name", name}}});
    }
  const auto each = [&](const char* type, const char* metric, const char* help, const char* field) {
    Family family(out, type, metric, help);
    for (const Here& one : here) family.sample(at(*one.worker, {field}), one.labels);
  };
  each("gauge", "gradwire_worker_step", "Step of the worker's last update.", "step");
  each("gauge", "gradwire_worker_staleness", "Steps by which the worker's last update was behind.", "staleness");
  each("gauge", "gradwire_worker_lag_seconds", "Seconds since the worker's last update.", "lag_s");
  each("gauge", "gradwire_worker_loss", "Loss that the worker last reported.", "loss");
  each("gauge", "gradwire_worker_present_seconds", "Seconds since the worker joined.", "joined_s");
  each("counter", "gradwire_worker_updates_total", "Updates of the worker that were applied.", "updates");
  each("counter", "gradwire_worker_late_total", "Updates of the worker refused as too late.", "late");
  Family bytes(out, "counter", "gradwire_worker_bytes_total", "Bytes of messages from (up) and to (down) the worker.");
  for (const Here& one : here)
    for (const char* direction : {"up", "down"}) {
      Labels labels = one.labels;
      labels.emplace_back("direction", direction);
      bytes.sample(at(*one.worker, {direction[0] == 'u' ? "bytes_up" : "bytes_down"}), labels);
    }
}

void step_seconds(std::string& out, const json& status) {
  const json& all = at(status, {"step_seconds"});
  if (!at(all, {"at_most"}).is_array() || !at(all, {"count"}).is_number()) return;
  Family family(out, "histogram", "gradwire_step_seconds", "Time from one step to the next.");
  for (const json& one : at(all, {"at_most"}))
    if (one.is_array() && one.size() == 2 && one[0].is_number())
      family.sample(one[1], {{"le", fmt::format("{}", one[0].get<double>())}}, "_bucket");
  family.sample(at(all, {"count"}), {{"le", "+Inf"}}, "_bucket");
  family.sample(at(all, {"sum"}), {}, "_sum");
  family.sample(at(all, {"count"}), {}, "_count");
}

}  // namespace

std::string metrics_text(const json& status) {
  std::string out;
  const auto gauge = [&](const char* name, const char* help, const json& value) {
    Family(out, "gauge", name, help).sample(value);
  };
  const auto counter = [&](const char* name, const char* help, const json& value) {
    Family(out, "counter", name, help).sample(value);
  };
  Family(out, "gauge", "gradwire_build_info", "The version of this server and its commit, in labels; always 1.")
      .sample(1, {{"version", text_at(at(status, {"build"}), "version")},
                  {"commit", text_at(at(status, {"build"}), "commit")}});
  Family(out, "gauge", "gradwire_info", "What this server does, in labels; always 1.")
      .sample(1, {{"mode", text_at(status, "mode")},
                  {"up", text_at(status, "up")},
                  {"down", text_at(status, "down")},
                  {"send", text_at(status, "send")}});
  Family state(out, "gauge", "gradwire_state", "1 for the state the server is in, 0 for the others.");
  for (const char* name :
       {"waiting for the first worker", "waiting for workers", "training", "waiting for the disk", "stopping"})
    state.sample(text_at(status, "state") == name ? 1 : 0, {{"state", name}});
  gauge("gradwire_uptime_seconds", "Seconds since the server started.", at(status, {"uptime_s"}));
  counter("gradwire_steps_total", "Steps the weights have made; a checkpoint keeps the count.", at(status, {"step"}));
  counter("gradwire_skipped_steps_total", "Steps that changed nothing, because something was not finite.",
          at(status, {"skipped_steps"}));
  const json& failed = at(status, {"failed"});
  Family(out, "gauge", "gradwire_training_failed", "1 if more than half of the steps were skipped, else 0.")
      .sample(failed.is_boolean() ? json(failed.get<bool>() ? 1 : 0) : json());
  step_seconds(out, status);
  gauge("gradwire_durable_step", "Step of the last checkpoint on disk.", at(status, {"durable_step"}));
  gauge("gradwire_loss", "Mean loss of the workers at the last step.", at(status, {"loss"}));
  gauge("gradwire_model_tensors", "Tensors of the model.", at(status, {"model", "tensors"}));
  gauge("gradwire_model_elements", "Elements of the model.", at(status, {"model", "elements"}));
  gauge("gradwire_model_parts", "Shards of the model.", at(status, {"model", "parts"}));
  gauge("gradwire_workers_present", "Workers that take part now.", at(status, {"workers", "present"}));
  gauge("gradwire_workers_min", "Workers below which no step is made.", at(status, {"workers", "min"}));
  gauge("gradwire_workers_max", "Workers above which joiners are refused.", at(status, {"workers", "max"}));
  Family(out, "counter", "gradwire_bytes_total", "Bytes of messages from (up) and to (down) the workers.")
      .sample(at(status, {"bytes", "up"}), {{"direction", "up"}})
      .sample(at(status, {"bytes", "down"}), {{"direction", "down"}});
  Family(out, "counter", "gradwire_fp32_bytes_total", "Bytes that the same messages would have taken in fp32.")
      .sample(at(status, {"bytes", "fp32_up"}), {{"direction", "up"}})
      .sample(at(status, {"bytes", "fp32_down"}), {{"direction", "down"}});
  counter("gradwire_updates_total", "Shards of updates that were applied.", at(status, {"staleness", "updates"}));
  counter("gradwire_staleness_steps_total", "Sum of the staleness of those, in steps.",
          at(status, {"staleness", "sum"}));
  gauge("gradwire_staleness_max", "Largest staleness of an applied update.", at(status, {"staleness", "max"}));
  gauge("gradwire_staleness_bound", "Staleness beyond which updates are refused.", at(status, {"staleness", "bound"}));
  Family ledger(out, "gauge", "gradwire_ledger", "Sum of the updates by what became of them.");
  for (const char* entry : {"computed", "applied", "held", "lost"})
    ledger.sample(at(status, {"ledger", entry}), {{"entry", entry}});
  gauge("gradwire_ledger_difference", "computed - applied - held - lost.", at(status, {"ledger", "difference"}));
  gauge("gradwire_ledger_relative_difference", "The difference relative to the magnitude of all updates.",
        at(status, {"ledger", "relative"}));
  Family refused(out, "counter", "gradwire_refused_total", "Messages and connections refused, by reason.");
  if (const json& reasons = at(status, {"refused"}); reasons.is_object())
    for (const auto& [reason, count] : reasons.items()) refused.sample(count, {{"reason", reason}});
  counter("gradwire_checkpoints_saved_total", "Checkpoints saved.", at(status, {"checkpoint", "saved"}));
  counter("gradwire_checkpoints_failed_total", "Checkpoints that could not be saved.",
          at(status, {"checkpoint", "failed"}));
  gauge("gradwire_checkpoint_age_seconds", "Seconds since the last saved checkpoint.",
        at(status, {"checkpoint", "last_s"}));
  gauge("gradwire_checkpoint_bytes", "Size of the last saved checkpoint.", at(status, {"checkpoint", "bytes"}));
  gauge("gradwire_model_bytes", "Memory for the weights, their sums and the messages of the current step.",
        at(status, {"memory_bytes"}));
  gauge("gradwire_connections", "Calls of workers that are open.", at(status, {"connections"}));
  gauge("gradwire_sockets", "Open sockets of the port for workers.", at(status, {"sockets"}));
  counter("gradwire_sockets_cut_off_total", "Connections cut off, to make room or for what they did.",
          at(status, {"cut_off"}));
  gauge("process_resident_memory_bytes", "Resident memory of the server.", at(status, {"process", "resident_bytes"}));
  gauge("process_open_fds", "Open descriptors of the server.", at(status, {"process", "open_files"}));
  gauge("process_start_time_seconds", "When the server started, in seconds since 1970.",
        at(status, {"process", "start_time"}));
  workers(out, status);
  // Labels may hold bytes that are not UTF-8; JSON's own writer knows how to replace them.
  return json::parse(json(out).dump(-1, ' ', false, json::error_handler_t::replace)).get<std::string>();
}

}  // namespace gradwire::server
