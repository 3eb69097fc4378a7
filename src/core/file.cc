// SPDX-License-Identifier: Apache-2.0
#include "core/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <utility>

#include "gradwire/error.h"

namespace gradwire {
namespace {

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
}

struct Place {
  bool exists = false, replaceable = true, special = false;
  mode_t mode = 0;
};

Place look_at(const std::string& place) {
  struct stat info;
  if (::stat(place.c_str(), &info) != 0) return {};
  const bool device = S_ISCHR(info.st_mode) || S_ISBLK(info.st_mode) || S_ISFIFO(info.st_mode);
  // A regular file that is only known as an open one, by a link of /proc, cannot be replaced by name.
  const bool open_file = S_ISREG(info.st_mode) && place.starts_with("/proc/");
  return {.exists = true,
          .replaceable = S_ISREG(info.st_mode) && !open_file,
          .special = device || open_file,
          .mode = info.st_mode & 0777};
}

[[noreturn]] void refuse_place(const std::string& path) {
  throw Error(ErrorKind::io, fmt::format("{}: is not a regular file and is not replaced by one", path), "path");
}

}  // namespace

void throw_errno(const std::string& path, const char* what, const char* field) {
  throw Error(ErrorKind::io, fmt::format("{}: cannot {}: {}", path, what, std::strerror(errno)), field);
}

std::string place_of(const std::string& path) {
  std::string place = path;
  for (int hops = 0; hops < 40; ++hops) {
    if (place.starts_with("/proc/")) return place;
    char target[PATH_MAX];
    const ssize_t length = ::readlink(place.c_str(), target, sizeof target);
    if (length < 0) return place;  // no link, or nothing at all
    if (static_cast<size_t>(length) == sizeof target) {
      errno = ENAMETOOLONG;
      throw_errno(path, "follow the link", "path");
    }
    const std::string next(target, static_cast<size_t>(length));
    place = next.starts_with('/') ? next : folder_of(place) + "/" + next;
  }
  errno = ELOOP;
  throw_errno(path, "follow the link", "path");
}

FileReplacement::FileReplacement(std::string path, SpecialFile special)
    : path_(std::move(path)), place_(place_of(path_)) {
  const Place there = look_at(place_);
  if (there.special && special == SpecialFile::write_to) {
    file_ = ::open(place_.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY | O_TRUNC);
    if (file_ < 0) throw_errno(path_, "write", "path");
    return;
  }
  if (!there.replaceable) refuse_place(path_);
  // The process and a number make the name unique, so that two writers of one path never share a temporary file. A
  // name that is taken was left by a process of the same number that died.
  static std::atomic<unsigned> serial{0};
  do {
    temporary_ = fmt::format("{}.{}.{}.tmp", place_, ::getpid(), serial++);
    file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (file_ < 0 && errno == EEXIST);
  if (file_ < 0) throw_errno(path_, "create a temporary file beside it", "path");
  if (there.exists) (void)::fchmod(file_, there.mode);  // who may read the old file may read the new one, no others
}

FileReplacement::~FileReplacement() {
  if (file_ >= 0) ::close(file_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void FileReplacement::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(file_, bytes.data(), std::min<size_t>(bytes.size(), size_t{1} << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(path_, "write", "write");
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
}

void FileReplacement::finish() {
  if (temporary_.empty()) {  // a device or a pipe, which has nothing to flush
    if (::close(std::exchange(file_, -1)) != 0) throw_errno(path_, "close", "close");
    return;
  }
  if (::fsync(file_) != 0) throw_errno(path_, "flush", "fsync");
  if (::close(std::exchange(file_, -1)) != 0) throw_errno(path_, "close", "close");
  if (!look_at(place_).replaceable) refuse_place(path_);  // it may be something else by now
  if (::rename(temporary_.c_str(), place_.c_str()) != 0) throw_errno(path_, "replace it", "rename");
  temporary_.clear();
  flush_folder(folder_of(place_));
}

void replace_file(const std::string& path, std::span<const std::byte> bytes) {
  FileReplacement file(path);
  file.write(bytes);
  file.finish();
}

void flush_folder(const std::string& folder) {
  const int directory = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool flushed = directory >= 0 && ::fsync(directory) == 0;
  const int error = errno;
  if (directory >= 0) ::close(directory);
  errno = error;
  // Some file systems cannot fsync a folder and say EINVAL; nothing more can be done there.
  if (!flushed && error != EINVAL) throw_errno(folder, "flush the folder", "fsync");
}

}  // namespace gradwire
