// SPDX-License-Identifier: Apache-2.0
// Commands of other programs in the same folder: gradwire-train, which links libtorch, and gradwire-server, which
// links gRPC. All arguments are passed on unchanged.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "cli/command.h"
#include "gradwire/error.h"

namespace gradwire::app {
namespace {

[[noreturn]] void hand_over(const std::string& name, const std::string& command, std::vector<std::string> words) {
  const std::filesystem::path program =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / ("gradwire-" + name);
  if (!std::filesystem::exists(program)) {
    const std::string missing =
        name == "train"
            ? "libtorch, which this build did not find (no {}): install torch for the Python that cmake finds, or name "
              "one with -DGRADWIRE_TORCH_PYTHON=, and build again"
            : "gRPC, which this build did not find (no {}): install libgrpc++-dev and build again";
    throw Error(ErrorKind::unsupported,
                fmt::format(fmt::runtime("gradwire {} needs " + missing), command, program.string()), command);
  }
  words.insert(words.begin(), {program.string(), command});
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  execv(program.c_str(), arguments.data());
  throw Error(ErrorKind::unsupported, fmt::format("{} cannot be run: {}", program.string(), std::strerror(errno)),
              command);
}

}  // namespace

void add_handover(CLI::App& app, Action& action, const char* program, const char* command, const char* meaning) {
  CLI::App* taken = app.add_subcommand(command, meaning);
  taken->set_help_flag();  // the other program answers --help
  taken->prefix_command();
  taken->callback([&action, taken, program, command] {
    action = [words = taken->remaining(), program, command] { hand_over(program, command, words); };
  });
}

}  // namespace gradwire::app
