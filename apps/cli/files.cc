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
#include <optional>

#include "core/file.h"
#include "core/machine.h"
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

// Fills `to` as far as the file reaches; returns the number of bytes.
size_t read_into(int fd, std::span<std::byte> to, const std::string& path) {
  size_t size = 0;
  while (size < to.size()) {
    const ssize_t got = read(fd, to.data() + size, std::min<size_t>(to.size() - size, size_t{1} << 30));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path, "cannot be read");
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  return size;
}

}  // namespace

std::vector<std::byte> read_file(const std::string& path, const FirstLook& look) {
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
  std::optional<uint64_t> expected;
  if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) expected = static_cast<uint64_t>(info.st_size);

  std::vector<std::byte> content(kFirstBytes);
  size_t size = read_into(fd, content, path);
  content.resize(size);
  // The size of a sparse file says nothing of what is in it.
  if (look) look(content, expected);
  if (size < kFirstBytes) return content;
  if (expected && *expected > machine_memory())
    throw Error(ErrorKind::io, fmt::format("{}: {} bytes are more than the memory of this machine", path, *expected),
                path);
  // A regular file is read directly into its place. One byte more finds out whether it has grown.
  content.resize(std::max<size_t>(expected ? static_cast<size_t>(*expected) + 1 : 0, 2 * kFirstBytes));
  for (;;) {
    size += read_into(fd, std::span(content).subspan(size), path);
    if (size < content.size()) break;
    content.resize(2 * content.size());
  }
  content.resize(size);
  return content;
}

void write_file(const std::string& path, std::span<const std::span<const std::byte>> parts) {
  if (path == "-") return write_all(STDOUT_FILENO, parts, "standard output");
  FileReplacement file(path, SpecialFile::write_to);
  std::optional<RemoveOnSignal> guard;
  if (!file.temporary().empty()) guard.emplace(file.temporary());
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
