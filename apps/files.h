// SPDX-License-Identifier: Apache-2.0
// Files as the commands use them: read whole, and written all or nothing. An output is written to a temporary file
// beside its final name and renamed when complete; an error, Ctrl-C or a kill by signal leaves nothing behind. "-" is
// standard input or output.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace gradwire::app {

std::vector<std::byte> read_file(const std::string& path);

// Writes the parts one after another. Devices and pipes are written to directly.
void write_file(const std::string& path, std::span<const std::span<const std::byte>> parts);

bool ends_with(const std::string& text, const std::string& end);

}  // namespace gradwire::app
