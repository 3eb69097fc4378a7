// SPDX-License-Identifier: Apache-2.0
#include "core/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "gradwire/error.h"

namespace gradwire {
namespace {

void expect_regular(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode))
    throw Error(ErrorKind::io, fmt::format("{}: is not a regular file and is not replaced by one", path), "path");
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
}

}  // namespace

void throw_errno(const std::string& path, const char* what, const char* field) {
  throw Error(ErrorKind::io, fmt::format("{}: cannot {}: {}", path, what, std::strerror(errno)), field);
}

FileReplacement::FileReplacement(std::string path) : path_(std::move(path)) {
  expect_regular(path_);
  // The process and a number make the name unique, so that two writers of one path never share a temporary file. A
  // name that is taken was left by a process of the same number that died.
  static std::atomic<unsigned> serial{0};
  do {
    temporary_ = fmt::format("{}.{}.{}.tmp", path_, ::getpid(), serial++);
    file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (file_ < 0 && errno == EEXIST);
  if (file_ < 0) throw_errno(path_, "create a temporary file beside it", "path");
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
  if (::fsync(file_) != 0) throw_errno(path_, "flush", "fsync");
  if (::close(std::exchange(file_, -1)) != 0) throw_errno(path_, "close", "close");
  expect_regular(path_);  // the path may name something else by now
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) throw_errno(path_, "replace it", "rename");
  temporary_.clear();
  flush_folder(folder_of(path_));
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
