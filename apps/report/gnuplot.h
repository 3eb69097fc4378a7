// SPDX-License-Identifier: Apache-2.0
// gnuplot as a function from a script to a picture. It is searched on the PATH when it is needed and run without a
// shell. The script is passed as a file without a name, and the picture is returned through a pipe, so that no path and
// no text of a user is ever part of a command line.
#pragma once

#include <string>

namespace gradwire::app {

// Returns what the script draws; it must not set an output. Error{unsupported}: gnuplot is missing or cannot draw it.
std::string gnuplot(const std::string& script);

// Text for a script: single quotes, in which gnuplot neither substitutes commands nor reads escapes. Control characters
// become blanks.
std::string gnuplot_text(const std::string& text);

}  // namespace gradwire::app
