// SPDX-License-Identifier: Apache-2.0
// How status_text.h words things. What the status does not know is a dash; lines about things that do not exist (a
// staleness bound, failed checkpoints) are left out.
#include "server/watch/status_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include "server/watch/watch_status.h"

namespace gradwire::server {
namespace {

using nlohmann::json;

std::optional<double> number(const json& value) {
  if (!value.is_number() || !std::isfinite(value.get<double>())) return std::nullopt;
  return value.get<double>();
}

// Words from outside: at most `limit` characters, none of which a terminal obeys.
std::string words(const json& value, size_t limit = 60) {
  if (!value.is_string()) return "-";
  // The writer of JSON replaces what is not UTF-8; after that every byte that is not 10xxxxxx begins a character.
  const auto clean = json::parse(value.dump(-1, ' ', false, json::error_handler_t::replace)).get<std::string>();
  std::string text;
  size_t characters = 0;
  for (size_t i = 0; i < clean.size();) {
    size_t next = i + 1;
    while (next < clean.size() && (clean[next] & 0xC0) == 0x80) ++next;
    const std::string_view one(clean.data() + i, next - i);
    i = next;
    if (++characters > limit) {
      text += "...";
      break;
    }
    const auto first = static_cast<unsigned char>(one[0]);
    // C0 and DEL; C1 (U+0080 to U+009F); U+FFFD itself; U+200B to U+200F, U+2028 to U+202E and U+2066 to U+2069, which
    // hide or turn around what follows.
    const auto second = static_cast<unsigned char>(one.size() > 1 ? one[1] : 0);
    const auto third = static_cast<unsigned char>(one.size() > 2 ? one[2] : 0);
    const bool obeyed =
        first < 0x20 || first == 0x7F || (first == 0xC2 && second < 0xA0) || one == "\xEF\xBF\xBD" ||
        (first == 0xE2 && second == 0x80 && ((third >= 0x8B && third <= 0x8F) || (third >= 0xA8 && third <= 0xAE))) ||
        (first == 0xE2 && second == 0x81 && third >= 0xA6 && third <= 0xA9);
    text += obeyed ? std::string_view("?") : one;
  }
  return text.empty() ? "-" : text;
}

size_t width(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string count(const json& value) {
  const auto known = number(value);
  if (!known) return "-";
  std::string digits = fmt::format("{:.0f}", *known);
  for (int i = static_cast<int>(digits.size()) - 3; i > (*known < 0 ? 1 : 0); i -= 3)
    digits.insert(static_cast<size_t>(i), ",");
  return digits;
}

std::string bytes(const json& value) {
  const auto known = number(value);
  if (!known) return "-";
  double scaled = *known;
  static constexpr std::array kUnits = {"B", "kB", "MB", "GB", "TB", "PB"};
  size_t unit = 0;
  for (; scaled >= 999.5 && unit + 1 < kUnits.size(); ++unit) scaled /= 1000;
  return unit == 0 ? fmt::format("{:.0f} B", scaled) : fmt::format("{:.3g} {}", scaled, kUnits[unit]);
}

std::string seconds(const json& value) {
  const auto known = number(value);
  if (!known) return "-";
  const double s = *known;
  if (s < 10) return fmt::format("{:.1f} s", s);
  if (s < 120) return fmt::format("{:.0f} s", s);
  const auto minutes = static_cast<int64_t>(s / 60);
  if (minutes < 120) return fmt::format("{} min", minutes);
  if (minutes < 48 * 60) return fmt::format("{} h {:02} min", minutes / 60, minutes % 60);
  return fmt::format("{} d {} h", minutes / 1440, minutes / 60 % 24);
}

std::string plain(const json& value) {
  const auto known = number(value);
  return known ? fmt::format("{:.4g}", *known) : "-";
}

std::string traffic(const json& status, const char* sent, const char* full) {
  std::string text = bytes(at(status, {"bytes", sent}));
  const auto ours = number(at(status, {"bytes", sent})), fp32 = number(at(status, {"bytes", full}));
  if (ours && fp32 && *fp32 > 0) text += fmt::format(", {:.3f} of fp32", *ours / *fp32);
  return text;
}

std::string table(const json& list) {
  static const std::string kAlignment = "lllrrrrrrrrl";
  std::vector<std::vector<std::string>> rows = {
      {"worker", "name", "state", "step", "stale", "lag", "updates", "late", "loss", "up", "down", "address"}};
  for (const json& worker : list)
    rows.push_back({words(at(worker, {"id"}), 16), words(at(worker, {"name"}), 24), words(at(worker, {"state"}), 16),
                    count(at(worker, {"step"})), count(at(worker, {"staleness"})), seconds(at(worker, {"lag_s"})),
                    count(at(worker, {"updates"})), count(at(worker, {"late"})), plain(at(worker, {"loss"})),
                    bytes(at(worker, {"bytes_up"})), bytes(at(worker, {"bytes_down"})),
                    words(at(worker, {"peer"}), 48)});
  std::vector<size_t> widths(rows[0].size(), 0);
  for (const auto& row : rows)
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], width(row[c]));
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string space(widths[c] - width(row[c]), ' ');
      line += (c ? "  " : "") + (kAlignment[c] == 'l' ? row[c] + space : space + row[c]);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

}  // namespace

std::string status_text(const json& status) {
  std::string text = fmt::format("gradwire server: {}, {}, up {}\n\n", words(at(status, {"state"})),
                                 words(at(status, {"mode"})), seconds(at(status, {"uptime_s"})));
  const auto line = [&](std::string_view name, const std::string& value) {
    text += fmt::format("{:<12}{}\n", name, value);
  };
  line("step", count(at(status, {"step"})) +
                   (number(at(status, {"durable_step"})) ? ", on disk " + count(at(status, {"durable_step"})) : ""));
  if (number(at(status, {"skipped_steps"})).value_or(0) > 0)
    line("skipped", count(at(status, {"skipped_steps"})) + " steps, not finite" +
                        (at(status, {"failed"}) == true ? ": more than half, so the training has FAILED" : ""));
  line("speed", plain(at(status, {"steps_per_s"})) + " steps/s");
  line("loss", plain(at(status, {"loss"})));
  line("workers", fmt::format("{} present, {} needed, {} at most", count(at(status, {"workers", "present"})),
                              count(at(status, {"workers", "min"})), count(at(status, {"workers", "max"}))));
  line("model", fmt::format("{} tensors, {} elements, {} shards", count(at(status, {"model", "tensors"})),
                            count(at(status, {"model", "elements"})), count(at(status, {"model", "parts"}))));
  line("codecs", fmt::format("up {}, down {} ({})", words(at(status, {"up"})), words(at(status, {"down"})),
                             words(at(status, {"send"}))));
  line("bytes up", traffic(status, "up", "fp32_up"));
  line("bytes down", traffic(status, "down", "fp32_down"));
  line("staleness",
       fmt::format("mean {}, largest {}", plain(at(status, {"staleness", "mean"})),
                   count(at(status, {"staleness", "max"}))) +
           (number(at(status, {"staleness", "bound"})) ? ", bound " + count(at(status, {"staleness", "bound"})) : ""));
  const auto relative = number(at(status, {"ledger", "relative"}));
  line("ledger", !relative ? "-"
                           : fmt::format("{} by {:.1e} relative ({} {:.0e})",
                                         *relative <= kLedgerTolerance ? "ok: off" : "OFF", *relative,
                                         *relative <= kLedgerTolerance ? "allowed" : "only allowed", kLedgerTolerance));
  line("", fmt::format("computed {} = applied {} + held {} + lost {}", plain(at(status, {"ledger", "computed"})),
                       plain(at(status, {"ledger", "applied"})), plain(at(status, {"ledger", "held"})),
                       plain(at(status, {"ledger", "lost"}))));
  std::string refused;
  if (const json& reasons = at(status, {"refused"}); reasons.is_object())
    for (const auto& [reason, times] : reasons.items())
      if (number(times).value_or(0) > 0) refused += (refused.empty() ? "" : ", ") + count(times) + " " + words(reason);
  line("refused", refused.empty() ? "nothing" : refused);
  if (!at(status, {"checkpoint", "path"}).is_string()) {
    line("checkpoint", "none is kept");
  } else {
    line("checkpoint", fmt::format("{}, every {} steps", words(at(status, {"checkpoint", "path"}), 200),
                                   count(at(status, {"checkpoint", "every"}))));
    line("", fmt::format("{} saved", count(at(status, {"checkpoint", "saved"}))) +
                 (number(at(status, {"checkpoint", "last_s"}))
                      ? fmt::format(", the last {} ago, {}", seconds(at(status, {"checkpoint", "last_s"})),
                                    bytes(at(status, {"checkpoint", "bytes"})))
                      : ""));
    if (number(at(status, {"checkpoint", "failed"})).value_or(0) > 0)
      line("", fmt::format("{} FAILED, the last: {}", count(at(status, {"checkpoint", "failed"})),
                           words(at(status, {"checkpoint", "last_error"}), 200)));
  }
  line("memory",
       fmt::format("{}, {} connections", bytes(at(status, {"memory_bytes"})), count(at(status, {"connections"}))));
  const json& list = at(status, {"workers", "list"});
  if (list.is_array() && !list.empty()) text += "\n" + table(list);
  return text;
}

}  // namespace gradwire::server
