// SPDX-License-Identifier: Apache-2.0
// Files as the commands use them. An input is read as a whole. An output is replaced atomically (core/file.h); an
// error, Ctrl-C or another signal that ends the program leaves no temporary file behind. "-" is standard input or
// output.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "gradwire/error.h"

namespace gradwire::app {

std::vector<std::byte> read_file(const std::string& path);

// Writes the parts one after another. Devices and pipes are written to directly.
void write_file(const std::string& path, std::span<const std::span<const std::byte>> parts);
void write_file(const std::string& path, const std::string& text);

// Runs `work` on the content of a file; an error of the library then names the file too.
template <class Work>
auto named(const std::string& path, Work work) {
  try {
    return work();
  } catch (const Error& error) {
    throw Error(error.kind(), path + ": " + error.what(), error.field(), error.rank());
  }
}

bool ends_with(const std::string& text, const std::string& end);

}  // namespace gradwire::app
