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

#include "cli/options.h"
#include "gradwire/error.h"

namespace gradwire::app {

int exit_code_of(const std::exception& error) {
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

std::string called_as;

}  // namespace

std::string command_line() { return called_as; }

}  // namespace gradwire::app

namespace {

// Words that a shell would take apart are quoted.
std::string quoted(const std::string& word) {
  if (!word.empty() &&
      word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=:,./+%@") ==
          std::string::npos)
    return word;
  std::string text = "'";
  for (char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

void complain(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  while (!text.empty() && (text.back() == ' ' || text.back() == '.')) text.pop_back();
  std::fprintf(stderr, "gradwire: error: %s\n", text.c_str());
}

// The innermost command on the line, so that a usage error can point to the right help page.
const CLI::App& innermost(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? app : innermost(*chosen.front());
}

std::string explain(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = innermost(app);
  std::string line = error.what();
  const auto known = command.get_subcommands([](const CLI::App*) { return true; });
  if (!known.empty() && command.get_subcommands().empty()) {
    const std::vector<std::string> words = command.remaining();
    if (words.empty()) {
      line = "no command is given; known are";
    } else if (words.front().starts_with('-')) {
      line = "option '" + words.front() + "' is unknown; commands are";
    } else {
      line = "command is '" + words.front() + "'; known are";
    }
    for (const CLI::App* each : known) line += (each == known.front() ? " " : ", ") + each->get_name();
  }
  std::string page = command.get_name();
  for (const CLI::App* up = command.get_parent(); up != nullptr; up = up->get_parent())
    page = up->get_name() + " " + page;
  return line + "; see " + page + " --help";
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
  app.set_version_flag("--version", "gradwire " GRADWIRE_VERSION, "Print the version and exit");
  app.require_subcommand(1);
  called_as = "gradwire";
  for (int i = 1; i < argc; ++i) called_as += " " + quoted(argv[i]);
  Action action;
  add_commands(app, action);
  for (CLI::App* command : app.get_subcommands({})) command->group("Commands");

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {  // --help, --version
    return app.exit(asked);
  } catch (const CLI::ParseError& error) {
    complain(explain(app, error));
    return kUsage;
  } catch (const std::exception& error) {
    complain(error.what());
    return exit_code_of(error);
  }
  try {
    action();
    if (std::fflush(stdout) != 0) throw gradwire::Error(gradwire::ErrorKind::io, "standard output cannot be written");
    return kOk;
  } catch (const Interrupted&) {
    return kInterrupted;
  } catch (const std::bad_alloc&) {
    complain("out of memory");
    return kInternal;
  } catch (const std::exception& error) {
    complain(error.what());
    return exit_code_of(error);
  }
}

}  // namespace gradwire::app
