// SPDX-License-Identifier: Apache-2.0
// gnuplot as a function from a script to a picture. It is found on the PATH when it is needed and run without a shell;
// the script comes to it as a file without a name, the picture goes back through a pipe, so that no path and no text of
// a user is ever part of a command line.
#pragma once

#include <string>

namespace gradwire::app {

// What the script, which sets no output, draws. Error{unsupported}: no gnuplot on the PATH, or one that cannot draw it.
std::string gnuplot(const std::string& script);

// Text for a script: single quotes, in which gnuplot neither substitutes commands nor reads escapes. Control characters
// become blanks.
std::string gnuplot_text(const std::string& text);

}  // namespace gradwire::app
