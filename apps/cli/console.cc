// SPDX-License-Identifier: Apache-2.0
// Tables, numbers with units and the progress line: see console.h.
#include "cli/console.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "core/check.h"
#include "gradwire/error.h"

namespace gradwire::app {

ConsoleTable::ConsoleTable(std::string alignment, std::vector<std::string> header) : alignment_(std::move(alignment)) {
  GW_CHECK(alignment_.size() == header.size());
  rows_.push_back(std::move(header));
}

void ConsoleTable::row(std::vector<std::string> cells) {
  GW_CHECK(cells.size() == alignment_.size());
  rows_.push_back(std::move(cells));
}

std::string ConsoleTable::str() const {
  std::vector<size_t> width(alignment_.size(), 0);
  for (const auto& row : rows_)
    for (size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size());
  std::string text;
  for (size_t r = 0; r < rows_.size(); ++r) {
    std::string line;
    for (size_t c = 0; c < width.size(); ++c) {
      if (c > 0) line += "  ";
      line += alignment_[c] == 'l' ? fmt::format("{:<{}}", rows_[r][c], width[c])
                                   : fmt::format("{:>{}}", rows_[r][c], width[c]);
    }
    while (!line.empty() && line.back() == ' ') line.pop_back();
    text += line + "\n";
    if (r == 0) {
      size_t total = 2 * (width.size() - 1);
      for (size_t w : width) total += w;
      text += std::string(total, '-') + "\n";
    }
  }
  return text;
}

std::string human_bytes(double bytes) {
  const char* units[] = {"B", "kB", "MB", "GB", "TB"};
  size_t unit = 0;
  while (bytes >= 999.5 && unit + 1 < std::size(units)) {
    bytes /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.3g} {}", bytes, units[unit]);
}

std::string human_count(uint64_t count) {
  const std::string digits = std::to_string(count);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string human_seconds(double seconds) {
  if (seconds >= 1) return fmt::format("{:.2f} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.1f} ms", seconds * 1e3);
  return fmt::format("{:.1f} us", seconds * 1e6);
}

std::string human_fraction(double fraction) {
  if (fraction == 0) return "0";
  if (!std::isfinite(fraction)) return fmt::format("{}", fraction);
  return std::abs(fraction) >= 0.01 ? fmt::format("{:.4f}", fraction) : fmt::format("{:.1e}", fraction);
}

Progress::Progress() : terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() { clear(); }

void Progress::show(const std::string& text) {
  if (!terminal_) return;
  // A line that wraps could not be erased. A terminal that does not report its width is assumed to be wide enough.
  winsize size{};
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
  // \r returns to the start of the line. ESC[K erases the rest of a longer line before it.
  const std::string line = printable(text);
  std::fprintf(stderr, "\r%.*s\033[K", known ? size.ws_col - 1 : 200, line.c_str());
  std::fflush(stderr);
  shown_ = true;
}

void Progress::clear() {
  if (!shown_) return;
  std::fprintf(stderr, "\r\033[K");
  std::fflush(stderr);
  shown_ = false;
}

namespace {

// Bytes of the UTF-8 character that begins at `at`, or 0 if there is none. Surrogates, overlong forms and what lies
// beyond Unicode are none.
size_t character_bytes(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) -> unsigned {
    return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u;
  };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc0 ? 2 : 0;
  if (length == 0) return 0;
  unsigned code = first & (0x7fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3f);
  }
  const unsigned least[] = {0, 0, 0x80, 0x800, 0x10000};
  return code < least[length] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ? 0 : length;
}

void print_line(const char* kind, std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  while (!text.empty() && (text.back() == ' ' || text.back() == '.')) text.pop_back();
  std::fprintf(stderr, "gradwire: %s: %s\n", kind, printable(text).c_str());
}

}  // namespace

std::string printable(const std::string& text) {
  std::string shown;
  for (size_t at = 0; at < text.size();) {
    const size_t length = character_bytes(text, at);
    const auto first = static_cast<unsigned char>(text[at]);
    const bool ascii_control = (first < ' ' && first != '\n' && first != '\t') || first == 0x7f;
    // U+0080 to U+009F: a terminal may take U+009B for the beginning of an escape sequence.
    const bool other_control = length == 2 && first == 0xc2 && static_cast<unsigned char>(text[at + 1]) < 0xa0;
    if (length == 0 || ascii_control || other_control) {
      shown += '?';
    } else {
      shown.append(text, at, length);
    }
    at += std::max<size_t>(1, length);
  }
  return shown;
}

void print(const std::string& text) {
  const std::string shown = printable(text);
  if (std::fwrite(shown.data(), 1, shown.size(), stdout) != shown.size() || std::fflush(stdout) != 0)
    throw Error(ErrorKind::io, "standard output cannot be written");
}

void print_error(const std::string& text) { print_line("error", text); }
void print_note(const std::string& text) { print_line("note", text); }

}  // namespace gradwire::app
