// SPDX-License-Identifier: Apache-2.0
// Files as the commands use them. An input is read as a whole, but its first bytes are looked at before memory is taken
// for the rest. An output is replaced atomically (core/file.h); an error, Ctrl-C or another signal that ends the
// program leaves no temporary file behind. "-" is standard input or output.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gradwire/error.h"

namespace gradwire::app {

// How much of a file is read before the rest: enough for the first block of a packed file.
inline constexpr size_t kFirstBytes = size_t{256} << 10;

// Judges the first bytes of a file, all of them if it is shorter than kFirstBytes, and throws to refuse it. `size` is
// that of a regular file; the length of a pipe is not known.
using FirstLook = std::function<void(std::span<const std::byte> first, std::optional<uint64_t> size)>;

// Error{io} for a file that is larger than the memory of this machine.
std::vector<std::byte> read_file(const std::string& path, const FirstLook& look = {});

// Writes the parts one after another. Devices and pipes are written to directly, and links stay links.
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
