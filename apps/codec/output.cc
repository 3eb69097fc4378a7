// SPDX-License-Identifier: Apache-2.0
#include "codec/output.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <CLI/CLI.hpp>

#include "gradwire/error.h"

namespace gradwire::app {

void add_force(CLI::App& command, bool& force) { command.add_flag("-f,--force", force, "Replace OUT if it exists"); }

void check_output(const std::string& in, const std::string& out, bool force) {
  struct stat from {
  }, to{};
  if (out == "-" || stat(out.c_str(), &to) != 0 || !S_ISREG(to.st_mode)) return;
  // The same file may have two names, so the names are not compared.
  if (in != "-" && stat(in.c_str(), &from) == 0 && from.st_dev == to.st_dev && from.st_ino == to.st_ino)
    throw Error(ErrorKind::usage, fmt::format("{}: IN and OUT are the same file", out), "OUT");
  if (!force)
    throw Error(ErrorKind::usage, fmt::format("{}: the file exists already; --force replaces it", out), "OUT");
}

}  // namespace gradwire::app
