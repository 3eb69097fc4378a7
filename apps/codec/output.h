// SPDX-License-Identifier: Apache-2.0
// What encode and decode share about their output: whether they may write it (never over their own input, over an
// existing file only with --force, and to a terminal only with --force), and what they say about it.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace CLI {
class App;
}

namespace gradwire::app {

struct OutputOptions {
  bool force = false, quiet = false, verbose = false, json = false;

  // Whether anybody reads what was done: on a terminal, or because it was asked for.
  bool tells() const;
};

// --force, --quiet, --verbose, --json.
void add_output(CLI::App& command, OutputOptions& options);

// Throws Error{usage} naming OUT. It is called before the input is read, so that a refusal costs nothing. Devices and
// pipes are written to as they are.
void check_output(const std::string& in, const std::string& out, const OutputOptions& options);

// What was done to a file. A ratio is fp32 bytes / bytes of the compressed file.
struct Done {
  std::string in, out;
  uint64_t bytes_in = 0, bytes_out = 0, elements = 0;
  uint64_t compressed_bytes = 0;     // of the frame as it is in the file
  std::optional<double> error;       // ||x - x'||^2 / ||x||^2, of encode
  nlohmann::ordered_json more = {};  // further fields for --json
};

// One line on stderr, or with --json an object on stdout (on stderr where OUT is stdout). Nothing unless tells().
void tell(const OutputOptions& options, const Done& done);

}  // namespace gradwire::app
