// SPDX-License-Identifier: Apache-2.0
// Output for people: tables with aligned columns, numbers with units, and a progress line. Tables go to stdout. The
// progress line goes to stderr, and only if that is a terminal, so that it does not appear in pipes and logs.
//
// Names of files, fields of files and words of servers come from elsewhere, and a terminal obeys the escape sequences
// in them. Everything that is printed passes through printable() here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradwire::app {

class ConsoleTable {
 public:
  enum class Align { left, right };
  // One letter per column: "lrr" is one column aligned left and two aligned right.
  ConsoleTable(std::string alignment, std::vector<std::string> header);
  void row(std::vector<std::string> cells);
  std::string str() const;

 private:
  std::string alignment_;
  std::vector<std::vector<std::string>> rows_;
};

std::string human_bytes(double bytes);        // 12.8 MB
std::string human_count(uint64_t count);      // 25,557,032
std::string human_seconds(double seconds);    // 1.23 s, 45.6 ms
std::string human_fraction(double fraction);  // 0.0123, 1.2e-08; 0 stays 0

// One line that is overwritten in place and erased when the work ends.
class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void show(const std::string& text);
  void clear();

 private:
  bool terminal_;
  bool shown_ = false;
};

// The text without control characters, each of which becomes a question mark: those of ASCII but tab and new line, and
// those of Unicode. So do bytes that are no UTF-8.
std::string printable(const std::string& text);

void print(const std::string& text);        // to stdout; Error{io} when that fails
void print_error(const std::string& text);  // one line on stderr: "gradwire: error: ..."
void print_note(const std::string& text);   // one line on stderr: "gradwire: note: ..."

}  // namespace gradwire::app
