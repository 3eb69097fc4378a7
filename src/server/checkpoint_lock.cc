// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>

#include "gradwire/error.h"

namespace gradwire::server {
namespace {

std::string holder(int file) {
  char digits[24] = "";
  const ssize_t count = ::pread(file, digits, sizeof digits - 1, 0);
  std::string text(digits, static_cast<size_t>(std::max<ssize_t>(count, 0)));
  text = text.substr(0, text.find_first_not_of("0123456789"));
  return text.empty() ? "" : fmt::format(" (pid {})", text);
}

bool still_named(int file, const std::string& path) {
  struct stat held {
  }, named{};
  return ::fstat(file, &held) == 0 && ::lstat(path.c_str(), &named) == 0 && held.st_dev == named.st_dev &&
         held.st_ino == named.st_ino;
}

}  // namespace

CheckpointLock::CheckpointLock(const std::string& checkpoint) : path_(checkpoint + ".lock") {
  const auto fail = [&](const std::string& why) {
    if (file_ >= 0) ::close(file_);
    throw Error(ErrorKind::io, fmt::format("checkpoint: {} {}", checkpoint, why), "checkpoint");
  };
  while (true) {
    file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (file_ < 0) fail(fmt::format("cannot be locked: {}: {}", path_, std::strerror(errno)));
    if (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) fail(fmt::format("is in use by another server{}", holder(file_)));
      // Some network file systems have no locks. There, a server is as it would be without this class.
      if (errno != ENOLCK && errno != ENOSYS && errno != EOPNOTSUPP)
        fail(fmt::format("cannot be locked: {}: {}", path_, std::strerror(errno)));
    }
    // Its last holder removes the file: what we have locked may not be the file of this name any more.
    if (still_named(file_, path_)) break;
    ::close(file_);
    file_ = -1;
  }
  const std::string pid = fmt::format("{}\n", ::getpid());
  // It is for people: a full disk does not matter here.
  if (::ftruncate(file_, 0) == 0) [[maybe_unused]]
    const ssize_t written = ::pwrite(file_, pid.data(), pid.size(), 0);
}

CheckpointLock::~CheckpointLock() {
  if (still_named(file_, path_)) ::unlink(path_.c_str());
  ::close(file_);
}

}  // namespace gradwire::server
