// SPDX-License-Identifier: Apache-2.0
#include "codec/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>

#include "cli/console.h"
#include "gradwire/error.h"

namespace gradwire::app {
namespace {

bool is_terminal(const std::string& path) {
  if (path == "-") return isatty(STDOUT_FILENO) == 1;
  const int fd = open(path.c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return false;
  const bool terminal = isatty(fd) == 1;
  close(fd);
  return terminal;
}

}  // namespace

bool OutputOptions::tells() const { return verbose || json || (!quiet && isatty(STDERR_FILENO) == 1); }

void add_output(CLI::App& command, OutputOptions& options) {
  command.add_flag("-f,--force", options.force, "Replace OUT if it exists; write to it even if it is a terminal");
  CLI::Option* quiet = command.add_flag("-q,--quiet", options.quiet, "Say nothing but errors");
  command
      .add_flag("-v,--verbose", options.verbose,
                "Say what was done (size, ratio, error) also where stderr is not a terminal")
      ->excludes(quiet);
  command.add_flag("--json", options.json, "Say it as one JSON object, on stdout (on stderr if OUT is -)")
      ->excludes(quiet);
}

void check_output(const std::string& in, const std::string& out, const OutputOptions& options) {
  struct stat from {
  }, to{};
  const bool there = out != "-" && stat(out.c_str(), &to) == 0;
  if ((out == "-" || (there && S_ISCHR(to.st_mode))) && !options.force && is_terminal(out))
    throw Error(ErrorKind::usage,
                fmt::format("{}: binary data is not written to a terminal; name a file, or use --force",
                            out == "-" ? "standard output" : out),
                "OUT");
  if (!there || !S_ISREG(to.st_mode)) return;
  // The same file may have two names, so the names are not compared.
  if (in != "-" && stat(in.c_str(), &from) == 0 && from.st_dev == to.st_dev && from.st_ino == to.st_ino)
    throw Error(ErrorKind::usage, fmt::format("{}: IN and OUT are the same file", out), "OUT");
  if (!options.force)
    throw Error(ErrorKind::usage, fmt::format("{}: the file exists already; --force replaces it", out), "OUT");
}

void tell(const OutputOptions& options, const Done& done) {
  if (!options.tells()) return;
  const double elements = static_cast<double>(done.elements), bytes = static_cast<double>(done.compressed_bytes);
  const double ratio = 4 * elements / bytes, bits = done.elements == 0 ? 0 : 8 * bytes / elements;
  std::string line;
  if (options.json) {
    nlohmann::ordered_json row = {{"in", done.in},
                                  {"out", done.out},
                                  {"bytes_in", done.bytes_in},
                                  {"bytes_out", done.bytes_out},
                                  {"elements", done.elements},
                                  {"ratio", ratio},
                                  {"bits_per_element", bits}};
    if (done.error) row["error"] = std::isfinite(*done.error) ? nlohmann::ordered_json(*done.error) : nullptr;
    row.update(done.more);
    line = row.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
    if (done.out != "-") return print(line);
  } else {
    const std::string error = !done.error                  ? ""
                              : std::isfinite(*done.error) ? ", error " + human_fraction(*done.error)
                                                           : ", error not a number";
    line = fmt::format("{} => {}: {} => {} bytes (ratio {:.2f}, {:.3f} bits per element{})\n", done.in, done.out,
                       human_count(done.bytes_in), human_count(done.bytes_out), ratio, bits, error);
  }
  std::fputs(printable(line).c_str(), stderr);
}

}  // namespace gradwire::app
