// SPDX-License-Identifier: Apache-2.0
// See program.h.
#include "cli/program.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "cli/console.h"
#include "cli/help.h"
#include "cli/version.h"
#include "core/nearest.h"
#include "gradwire/error.h"

namespace gradwire::app {

int exit_code_of(const std::exception& error) {
  if (dynamic_cast<const TrainingFailed*>(&error)) return kFailed;
  const auto* known = dynamic_cast<const Error*>(&error);
  if (known == nullptr) return kInternal;
  switch (known->kind()) {
    case ErrorKind::usage:
      return kUsage;
    case ErrorKind::frame:
      return kBadInput;
    case ErrorKind::io:
      return kIo;
    case ErrorKind::unsupported:
      return kUnsupported;
    case ErrorKind::mismatch:
    case ErrorKind::engine:
      return kPeers;
    case ErrorKind::device:
      return kDevice;
  }
  return kInternal;
}

namespace {

std::vector<std::string> called_as;

// A word that a shell would split or interpret is quoted.
std::string quoted(const std::string& word) {
  if (!word.empty() &&
      word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=:,./+%@") ==
          std::string::npos)
    return word;
  std::string text = "'";
  for (char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

}  // namespace

const std::vector<std::string>& command_words() { return called_as; }

std::string quoted_line(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) line += (line.empty() ? "" : " ") + quoted(word);
  return line;
}

}  // namespace gradwire::app

namespace {

// The innermost command on the line, so that a usage error can point to the right help page.
const CLI::App& innermost(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? app : innermost(*chosen.front());
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* each : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(each->get_name());
  return names;
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

std::string did_you_mean(const std::string& word, const std::vector<std::string>& names) {
  const std::string meant = gradwire::nearest_name(word, names);
  return meant.empty() ? "" : " (did you mean " + meant + "?)";
}

std::string unknown_command(const std::string& word, const std::vector<std::string>& names) {
  std::string line = "'" + word + "' is not a command" + did_you_mean(word, names) + "; known are";
  for (const std::string& name : names) line += (name == names.front() ? " " : ", ") + name;
  return line;
}

std::string unknown_option(const std::string& word, const std::vector<std::string>& names) {
  const std::string name = word.substr(0, word.find('='));
  return "option '" + name + "' is unknown" + did_you_mean(name, names);
}

std::string explain(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = innermost(app);
  const std::vector<std::string> names = command_names(command), words = command.remaining();
  const auto dashed = std::find_if(words.begin(), words.end(), [](const std::string& w) { return w.starts_with('-'); });
  std::string line = error.what();
  if (dashed != words.end()) {
    line = unknown_option(*dashed, option_names(command));
  } else if (!names.empty() && command.get_subcommands().empty()) {
    if (words.empty()) {
      line = "no command is given; known are";
      for (const std::string& name : names) line += (name == names.front() ? " " : ", ") + name;
    } else {
      line = unknown_command(words.front(), names);
    }
  } else if (!words.empty()) {
    line = "argument '" + words.front() + "' was not expected";
  }
  std::string page = command.get_name();
  for (const CLI::App* up = command.get_parent(); up != nullptr; up = up->get_parent())
    page = up->get_name() + " " + page;
  return line + "; see " + page + " --help";
}

// `gradwire help encode` means `gradwire encode --help`, and `gradwire version` means `gradwire --version`.
std::vector<std::string> plain_arguments(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty()) return words;
  if (words.front() == "help") {
    words.erase(words.begin());
    words.push_back("--help");
  } else if (words == std::vector<std::string>{"version"}) {
    words.front() = "--version";
  }
  return words;
}

}  // namespace

namespace gradwire::app {

int run_program(int argc, char** argv, const std::string& footer,
                const std::function<void(CLI::App&, Action&)>& add_commands) {
  CLI::App app("gradwire compresses what distributed training sends: gradients up, weights down.", "gradwire");
  auto formatter = std::make_shared<HelpFormatter>();  // commands inherit it
  formatter->column_width(30);
  formatter->label("SUBCOMMAND", "COMMAND");
  formatter->label("Positionals", "Arguments");
  app.formatter(formatter);
  app.set_help_flag("-h,--help", "Print this page and exit");
  app.footer(footer);
  app.set_version_flag("--version", "gradwire " + version_text(), "Print the version and the commit, and exit");
  app.require_subcommand(1);
  called_as.assign(argv, argv + argc);
  called_as.front() = "gradwire";
  Action action;
  add_commands(app, action);
  for (CLI::App* command : app.get_subcommands({})) command->group("Commands");

  std::vector<std::string> words = plain_arguments(argc, argv);
  const std::vector<std::string> names = command_names(app);
  // The parser would answer `gradwire nosuch --help` with the general page and success.
  if (!words.empty() && !words.front().starts_with('-') &&
      std::find(names.begin(), names.end(), words.front()) == names.end()) {
    print_error(unknown_command(words.front(), names) + "; see gradwire --help");
    return kUsage;
  }
  std::reverse(words.begin(), words.end());  // as the parser wants a vector of arguments
  try {
    app.parse(std::move(words));
  } catch (const CLI::Success& asked) {  // --help, --version
    return app.exit(asked);
  } catch (const CLI::ParseError& error) {
    print_error(explain(app, error));
    return kUsage;
  } catch (const std::exception& error) {
    print_error(error.what());
    return exit_code_of(error);
  }
  try {
    action();
    if (std::fflush(stdout) != 0) throw gradwire::Error(gradwire::ErrorKind::io, "standard output cannot be written");
    return kOk;
  } catch (const Interrupted&) {
    return kInterrupted;
  } catch (const std::bad_alloc&) {
    print_error("out of memory");
    return kInternal;
  } catch (const std::exception& error) {
    print_error(error.what());
    return exit_code_of(error);
  }
}

}  // namespace gradwire::app
