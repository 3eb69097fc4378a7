// SPDX-License-Identifier: Apache-2.0
// Runs gnuplot: see gnuplot.h.
#include "report/gnuplot.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "gradwire/error.h"

namespace gradwire::app {
namespace {

[[noreturn]] void fail(const char* what, int number) {
  throw Error(ErrorKind::io, fmt::format("gnuplot: {}: {}", what, std::strerror(number)), "plot");
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {
    if (fd < 0) fail("no descriptor for it", errno);
  }
  ~Descriptor() { shut(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int operator*() const { return fd_; }
  void shut() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

std::string read_all(int fd) {
  std::string content;
  char part[1 << 16];
  for (;;) {
    const ssize_t got = read(fd, part, sizeof(part));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("its output cannot be read", errno);
    if (got == 0) return content;
    content.append(part, static_cast<size_t>(got));
  }
}

}  // namespace

std::string gnuplot(const std::string& script) {
  Descriptor input(memfd_create("script", MFD_CLOEXEC)), errors(memfd_create("errors", MFD_CLOEXEC));
  for (size_t done = 0; done < script.size();) {
    const ssize_t written = write(*input, script.data() + done, script.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("its script cannot be written", errno);
    done += static_cast<size_t>(written);
  }
  lseek(*input, 0, SEEK_SET);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail("no pipe to it", errno);
  Descriptor from(ends[0]), to(ends[1]);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, *input, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, *to, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, *errors, STDERR_FILENO);
  // -d: the start-up file of a user must not change the picture.
  const char* arguments[] = {"gnuplot", "-d", nullptr};
  pid_t child = 0;
  const int failed =
      posix_spawnp(&child, arguments[0], &actions, nullptr, const_cast<char* const*>(arguments), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed == ENOENT)
    throw Error(ErrorKind::unsupported, "plots need gnuplot, which is not on the PATH: apt-get install gnuplot-nox",
                "plot");
  if (failed != 0) fail("cannot be started", failed);
  to.shut();  // otherwise the pipe would never end
  std::string picture = read_all(*from);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (status != 0 || picture.empty()) {
    lseek(*errors, 0, SEEK_SET);
    std::string why = read_all(*errors);
    std::replace(why.begin(), why.end(), '\n', ' ');
    throw Error(ErrorKind::unsupported, fmt::format("gnuplot did not draw the plot: {}", why.substr(0, 400)), "plot");
  }
  return picture;
}

std::string gnuplot_text(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) {
    if (c == '\'') quoted += '\'';
    quoted += static_cast<unsigned char>(c) < ' ' || c == 0x7f ? ' ' : c;
  }
  return quoted + "'";
}

}  // namespace gradwire::app
