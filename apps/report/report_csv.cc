// SPDX-License-Identifier: Apache-2.0
// results.csv: one row per run and epoch with every single number of the record, in the shortest form that reads back
// as the same number. Not-a-number is an empty cell. Texts are quoted where RFC 4180 requires it.
#include <fmt/format.h>

#include <cmath>

#include "report/report_write.h"

namespace gradwire::app {
namespace {

std::string cell(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + "\"";
}

std::string cell(double value) { return std::isfinite(value) ? fmt::format("{}", value) : ""; }
std::string cell(uint64_t value) { return fmt::format("{}", value); }

// The name of a column and how it is read are kept together, so that the header always matches the rows.
struct Column {
  const char* name;
  std::string (*of)(const Run&, const Epoch&);
};

#define RUN(field)                                                       \
  {                                                                      \
#field, [](const Run& run, const Epoch&) { return cell(run.field); } \
  }
#define EPOCH(field)                                                         \
  {                                                                          \
#field, [](const Run&, const Epoch& epoch) { return cell(epoch.field); } \
  }
#define SECONDS(field)                                                                          \
  {                                                                                             \
#field "_seconds", [](const Run&, const Epoch& epoch) { return cell(epoch.seconds.field); } \
  }
#define MEMORY(field)                                                                    \
  {                                                                                      \
#field "_bytes", [](const Run& run, const Epoch&) { return cell(run.memory.field); } \
  }

constexpr Column kColumns[] = {
    RUN(task),
    RUN(model),
    RUN(codec),
    RUN(canonical),
    RUN(collective),
    RUN(workers),
    RUN(seed),
    EPOCH(epoch),
    EPOCH(step),
    EPOCH(train_loss),
    EPOCH(train_accuracy),
    EPOCH(test_loss),
    EPOCH(test_accuracy),
    EPOCH(bits),
    EPOCH(bytes_sent),
    SECONDS(wall),
    SECONDS(compute),
    SECONDS(encode),
    SECONDS(wait),
    SECONDS(decode),
    EPOCH(rate),
    {"finished", [](const Run& run, const Epoch&) { return std::string(run.finished ? "true" : "false"); }},
    RUN(skipped_steps),
    {"metric", [](const Run& run, const Epoch&) { return std::string(name_of(run.metric)); }},
    RUN(weights),
    RUN(parameters),
    RUN(batch),
    RUN(optimizer),
    {"base_rate", [](const Run& run, const Epoch&) { return cell(run.rate); }},
    RUN(schedule),
    RUN(engine),
    RUN(device),
    RUN(machine),
    MEMORY(peak),
    MEMORY(gradients),
    MEMORY(residuals),
    MEMORY(messages),
    {"gradwire", [](const Run& run, const Epoch&) { return cell(run.version); }},
    RUN(commit),
    RUN(date),
    RUN(host),
};

}  // namespace

std::string csv_text(const std::vector<Run>& runs) {
  std::string text;
  const auto row = [&text](auto content) {
    for (const Column& column : kColumns) {
      if (&column != kColumns) text += ',';
      text += content(column);
    }
    text += "\n";
  };
  row([](const Column& column) { return std::string(column.name); });
  for (const Run& run : runs)
    for (const Epoch& epoch : run.epochs) row([&](const Column& column) { return column.of(run, epoch); });
  return text;
}

}  // namespace gradwire::app
