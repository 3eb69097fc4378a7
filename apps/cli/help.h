// SPDX-License-Identifier: Apache-2.0
// How help pages show options: the name and the kind of value on the left, the meaning, the allowed range and the
// default on the right. CLI11 would print its own notation for checks and flags ("TEXT:{a,b}", "--no-x{false}")
// instead.
#pragma once

#include <CLI/CLI.hpp>
#include <regex>
#include <string>

namespace gradwire::app {

class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_name(const CLI::Option* option, bool positional) const override {
    static const std::regex flag_value("\\{[^}]*\\}");
    return std::regex_replace(CLI::Formatter::make_option_name(option, positional), flag_value, "");
  }

  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string kind = parts_of(option).kind;
    return kind.empty() ? "" : " " + kind;
  }

  std::string make_option_desc(const CLI::Option* option) const override {
    std::string text = option->get_description();
    const std::string range = parts_of(option).range;
    if (!range.empty()) text += ", " + range;
    if (option->get_required() && !option->get_positional()) text += " (required)";
    std::string value = option->get_default_str();
    if (value.size() > 2 && value.front() == '[') value = value.substr(1, value.size() - 2);  // a list with one entry
    if (!value.empty()) text += " [default: " + value + "]";
    return text;
  }

 private:
  struct KindAndRange {
    std::string kind, range;
  };

  // CLI11 appends the description of every check to the name of the kind, after a colon: ":{gather,scatter}" for a
  // choice, ":FLOAT in [0.1 - 1e+07]" for a range.
  static KindAndRange parts_of(const CLI::Option* option) {
    static const std::regex choice(":\\{[^}]*\\}"), range(":[A-Z]+ in \\[(\\S+) - (\\S+)\\]");
    const std::string name = option->get_type_name();
    std::smatch found;
    KindAndRange parts{std::regex_replace(std::regex_replace(name, choice, ""), range, ""), ""};
    if (std::regex_search(name, found, range)) parts.range = "from " + found[1].str() + " to " + found[2].str();
    return parts;
  }
};

}  // namespace gradwire::app
