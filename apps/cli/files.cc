// SPDX-License-Identifier: Apache-2.0
// Whole files in, all-or-nothing files out: see files.h.
#include "cli/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "gradwire/error.h"

namespace gradwire::app {
namespace {

[[noreturn]] void fail(const std::string& path, const char* what) {
  throw Error(ErrorKind::io, fmt::format("{}: {}: {}", path, what, std::strerror(errno)), path);
}

// The temporary that a signal must remove. A plain array: a handler may touch nothing that allocates.
char pending_path[4096];

void remove_pending(int signal_number) {
  if (pending_path[0] != '\0') unlink(pending_path);
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

constexpr int kEnding[] = {SIGINT, SIGTERM, SIGHUP};

class Temporary {
 public:
  explicit Temporary(const std::string& path) : path_(path + ".XXXXXX") {
    if (path_.size() >= sizeof(pending_path)) {
      errno = ENAMETOOLONG;
      fail(path, "cannot be written");
    }
    fd_ = mkstemp(path_.data());
    if (fd_ < 0) fail(path, "cannot be written");
    std::memcpy(pending_path, path_.c_str(), path_.size() + 1);
    for (size_t i = 0; i < std::size(kEnding); ++i) {
      before_[i] = signal(kEnding[i], remove_pending);
      if (before_[i] != SIG_DFL) signal(kEnding[i], before_[i]);  // the program has something else in mind than to end
    }
  }
  ~Temporary() {
    if (fd_ >= 0) close(fd_);
    if (!renamed_) unlink(path_.c_str());
    pending_path[0] = '\0';
    for (size_t i = 0; i < std::size(kEnding); ++i) signal(kEnding[i], before_[i]);
  }
  int fd() const { return fd_; }
  void rename_to(const std::string& path) {
    const mode_t mask = umask(0);
    umask(mask);
    if (fchmod(fd_, 0666 & ~mask) != 0) fail(path, "cannot be written");
    const int closed = close(fd_);
    fd_ = -1;
    if (closed != 0 || std::rename(path_.c_str(), path.c_str()) != 0) fail(path, "cannot be written");
    renamed_ = true;
  }

 private:
  std::string path_;
  void (*before_[std::size(kEnding)])(int) = {};
  int fd_ = -1;
  bool renamed_ = false;
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
    // A regular file is read straight into its place; one more byte is asked for to see the end of any input.
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
  Temporary temporary(path);
  write_all(temporary.fd(), parts, path);
  temporary.rename_to(path);
}

void write_file(const std::string& path, const std::string& text) {
  const std::span<const std::byte> part = std::as_bytes(std::span(text));
  write_file(path, {&part, 1});
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace gradwire::app
