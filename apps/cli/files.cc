// SPDX-License-Identifier: Apache-2.0
// Files are read as a whole and replaced atomically: see files.h.
#include "cli/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "core/file.h"
#include "gradwire/error.h"

namespace gradwire::app {
namespace {

[[noreturn]] void fail(const std::string& path, const char* what) {
  throw Error(ErrorKind::io, fmt::format("{}: {}: {}", path, what, std::strerror(errno)), path);
}

// The temporary file that a signal must remove. It is a plain array, because a handler may use nothing that allocates.
char pending_path[4096];

void remove_pending(int signal_number) {
  if (pending_path[0] != '\0') unlink(pending_path);
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

constexpr int kEnding[] = {SIGINT, SIGTERM, SIGHUP};

// While it lives, a signal that ends the program removes the file first. A signal that the program handles itself keeps
// its handler: that command ends in its own way.
class RemoveOnSignal {
 public:
  explicit RemoveOnSignal(const std::string& path) {
    if (path.size() >= sizeof(pending_path)) {
      errno = ENAMETOOLONG;
      fail(path, "cannot be written");
    }
    std::memcpy(pending_path, path.c_str(), path.size() + 1);
    for (size_t i = 0; i < std::size(kEnding); ++i) {
      before_[i] = signal(kEnding[i], remove_pending);
      if (before_[i] != SIG_DFL) signal(kEnding[i], before_[i]);
    }
  }
  ~RemoveOnSignal() {
    pending_path[0] = '\0';
    for (size_t i = 0; i < std::size(kEnding); ++i) signal(kEnding[i], before_[i]);
  }
  RemoveOnSignal(const RemoveOnSignal&) = delete;
  RemoveOnSignal& operator=(const RemoveOnSignal&) = delete;

 private:
  void (*before_[std::size(kEnding)])(int) = {};
};

void write_all(int fd, std::span<const std::span<const std::byte>> parts, const std::string& path) {
  for (std::span<const std::byte> part : parts) {
    while (!part.empty()) {
      const ssize_t written = write(fd, part.data(), std::min<size_t>(part.size(), size_t{1} << 30));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail(path, "cannot be written");
      part = part.subspan(static_cast<size_t>(written));
    }
  }
}

}  // namespace

std::vector<std::byte> read_file(const std::string& path) {
  const bool standard_input = path == "-";
  const int fd = standard_input ? STDIN_FILENO : open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail(path, "cannot be opened");
  struct Closer {
    int fd;
    ~Closer() {
      if (fd != STDIN_FILENO) close(fd);
    }
  } closer{fd};
  struct stat info {};
  std::vector<std::byte> content;
  size_t size = 0;
  if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) content.resize(static_cast<size_t>(info.st_size));
  for (;;) {
    // A regular file is read directly into its place. Asking for one more byte finds the end of any input.
    if (size == content.size()) {
      std::byte more[1];
      const ssize_t got = read(fd, more, 1);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail(path, "cannot be read");
      if (got == 0) break;
      content.resize(std::max<size_t>(size_t{1} << 16, content.size() * 2));
      content[size++] = more[0];
    }
    const ssize_t got = read(fd, content.data() + size, std::min<size_t>(content.size() - size, size_t{1} << 30));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path, "cannot be read");
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  content.resize(size);
  return content;
}

void write_file(const std::string& path, std::span<const std::span<const std::byte>> parts) {
  if (path == "-") return write_all(STDOUT_FILENO, parts, "standard output");
  struct stat info {};
  if (stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    // Renaming over a device or a pipe would replace it.
    const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd < 0) fail(path, "cannot be written");
    try {
      write_all(fd, parts, path);
    } catch (...) {
      close(fd);
      throw;
    }
    if (close(fd) != 0) fail(path, "cannot be written");
    return;
  }
  FileReplacement file(path);
  const RemoveOnSignal guard(file.temporary());
  for (const std::span<const std::byte> part : parts) file.write(part);
  file.finish();
}

void write_file(const std::string& path, const std::string& text) {
  const std::span<const std::byte> part = std::as_bytes(std::span(text));
  write_file(path, {&part, 1});
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace gradwire::app
