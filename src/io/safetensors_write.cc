// SPDX-License-Identifier: Apache-2.0
// Writing, all or nothing. The order of events is the promise:
//
//   path.tmp is created and locked        a lock that is held means that another writer is at work; a file without
//                                         one was left by a writer that died
//   it is filled and flushed              from here on it is whole
//   path gets a second name, path.old.tmp a hard link, if the former file is to be kept
//   path.tmp is renamed to path           the one instant at which old becomes new
//   path.old.tmp is renamed to path.old
//   the folder is flushed                 the names survive a power cut
//
// Until the rename an error leaves the path as it was and removes the temporary file.
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <new>
#include <unordered_set>

#include "core/file.h"
#include "gradwire/error.h"
#include "io/safetensors.h"
#include "io/safetensors_header.h"

namespace gradwire::io {
namespace {

constexpr size_t kWriteChunk = size_t{4} << 20;  // hashed and written while it is in the cache

// Unlike FileReplacement (core/file.h), it lets one writer at a time work on a path, cleans up after a writer that
// died, and can keep the former file.
class LockedReplacement {
 public:
  LockedReplacement(const std::string& path, const WriteOptions& options) : path_(path), options_(options) {
    const size_t slash = path.rfind('/');
    name_ = slash == std::string::npos ? path : path.substr(slash + 1);
    temporary_ = name_ + ".tmp";
    former_ = name_ + ".old.tmp";
    if (name_.empty()) throw Error(ErrorKind::io, fmt::format("{}: cannot write: no file name", path_), "path");
    const std::string folder = slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
    folder_ = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder_ < 0) fail("open its folder");
    try {
      open_temporary();
    } catch (...) {
      release();
      throw;
    }
  }
  ~LockedReplacement() { release(); }
  LockedReplacement(const LockedReplacement&) = delete;
  LockedReplacement& operator=(const LockedReplacement&) = delete;

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::write(file_, bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail("write");
      bytes = bytes.subspan(static_cast<size_t>(n));
    }
  }

  void finish() {
    if (::fsync(file_) != 0) fail("flush");
    reached("synced");
    if (options_.keep_former) link_former();
    if (::renameat(folder_, temporary_.c_str(), folder_, name_.c_str()) != 0) fail("replace it");
    owns_temporary_ = false;
    reached("renamed");
    if (owns_former_) {
      if (::renameat(folder_, former_.c_str(), folder_, (name_ + ".old").c_str()) != 0) fail("keep the former file");
      ::unlinkat(folder_, former_.c_str(), 0);  // rename does nothing if both are names of one file
      owns_former_ = false;
      reached("kept");
    }
    // Some file systems know no fsync of a folder and say EINVAL; there is nothing more to be done there.
    if (::fsync(folder_) != 0 && errno != EINVAL) fail("flush its folder");
  }

  void reached(const char* stage) const {
    if (options_.hook) options_.hook(stage);
  }

 private:
  void release() {
    if (owns_temporary_) ::unlinkat(folder_, temporary_.c_str(), 0);
    if (owns_former_) ::unlinkat(folder_, former_.c_str(), 0);
    if (file_ >= 0) ::close(file_);  // and with it the lock
    ::close(folder_);
  }

  [[noreturn]] void fail(const char* what) const { throw_errno(path_, what, "path"); }

  void open_temporary() {
    struct stat there;
    if (::fstatat(folder_, name_.c_str(), &there, 0) == 0 && !S_ISREG(there.st_mode))
      throw Error(ErrorKind::io, fmt::format("{}: cannot replace it: not a regular file", path_), "path");
    for (;;) {
      file_ = ::openat(folder_, temporary_.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
      if (file_ < 0) fail("create a temporary file beside it");
      if (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK)
          throw Error(ErrorKind::io, fmt::format("{}: cannot write: somebody else is writing it", path_), "path");
        if (errno != ENOLCK && errno != ENOSYS && errno != EOPNOTSUPP) fail("lock its temporary file");
      }
      // Between open and lock its owner may have renamed it: what we hold could be the very file we want to keep.
      struct stat held, named;
      if (::fstat(file_, &held) != 0) fail("read the state of its temporary file");
      const bool same = ::fstatat(folder_, temporary_.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0 &&
                        held.st_dev == named.st_dev && held.st_ino == named.st_ino;
      if (same && !S_ISREG(held.st_mode))
        throw Error(ErrorKind::io, fmt::format("{}: cannot write: {} is not a regular file", path_, temporary_),
                    "path");
      if (same && held.st_nlink == 1) break;
      if (same && ::unlinkat(folder_, temporary_.c_str(), 0) != 0) fail("remove an old temporary file");
      ::close(file_);
      file_ = -1;
    }
    owns_temporary_ = true;
    if (::ftruncate(file_, 0) != 0) fail("empty an old temporary file");
    if (::unlinkat(folder_, former_.c_str(), 0) != 0 && errno != ENOENT) fail("remove an old temporary file");
  }

  void link_former() {
    owns_former_ = ::linkat(folder_, name_.c_str(), folder_, former_.c_str(), 0) == 0;
    const bool no_links = errno == EPERM || errno == EOPNOTSUPP || errno == ENOSYS || errno == EMLINK;
    if (!owns_former_ && errno != ENOENT && !no_links) fail("keep the former file");
    if (owns_former_) reached("linked");
  }

  const std::string path_;
  const WriteOptions& options_;
  std::string name_, temporary_, former_;
  int folder_ = -1, file_ = -1;
  bool owns_temporary_ = false, owns_former_ = false;
};

// Writes in chunks, hashes them if asked to, and reports when half is written.
class ChunkedWriter {
 public:
  ChunkedWriter(LockedReplacement& file, uint64_t total, bool hashed) : file_(file), half_(total / 2) {
    if (!hashed) return;
    state_.reset(XXH3_createState());
    if (!state_) throw std::bad_alloc();
    XXH3_64bits_reset(state_.get());
  }

  void put(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const uint64_t until_half = written_ < half_ ? half_ - written_ : kWriteChunk;
      const auto chunk = bytes.first(std::min<uint64_t>({bytes.size(), kWriteChunk, until_half}));
      if (state_) XXH3_64bits_update(state_.get(), chunk.data(), chunk.size());
      file_.write(chunk);
      written_ += chunk.size();
      if (written_ == half_) file_.reached("half");
      bytes = bytes.subspan(chunk.size());
    }
  }

  uint64_t hash() const { return XXH3_64bits_digest(state_.get()); }

 private:
  LockedReplacement& file_;
  uint64_t half_, written_ = 0;
  std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state_{nullptr, &XXH3_freeState};
};

[[noreturn]] void misuse(const std::string& path, const char* field, const std::string& why) {
  throw Error(ErrorKind::usage, fmt::format("{}: {}: {}", path, field, why), field);
}

void check_tensor(const std::string& path, const TensorBytes& t) {
  if (t.name == "__metadata__") misuse(path, "name", "a tensor cannot be called \"__metadata__\"");
  if (element_bytes(t.dtype) == 0)
    misuse(path, "dtype", fmt::format("of {} is {}, which is unknown", shown(t.name), shown(t.dtype)));
  uint64_t bytes;
  if (t.shape.size() > kMaxDimensions || !tensor_bytes(t.shape, element_bytes(t.dtype), bytes))
    misuse(path, "shape",
           fmt::format("of {} is [{}]; allowed are {} dimensions from 0 and less than 2^63 bytes", shown(t.name),
                       fmt::join(t.shape, ", "), kMaxDimensions));
  if (bytes != t.bytes.size())
    misuse(path, "bytes",
           fmt::format("of {} are {}; {} [{}] takes {}", shown(t.name), t.bytes.size(), t.dtype,
                       fmt::join(t.shape, ", "), bytes));
}

}  // namespace

void write_safetensors(const std::string& path, std::span<const TensorBytes> tensors, const Metadata& metadata,
                       const WriteOptions& options) {
  const bool sealed = !options.check.empty();
  uint64_t check = 0;
  const TensorBytes last{options.check, "U8", {sizeof check}, std::as_bytes(std::span(&check, 1))};
  std::vector<const TensorBytes*> order;
  for (const TensorBytes& t : tensors) order.push_back(&t);
  std::stable_sort(order.begin(), order.end(), [](const TensorBytes* a, const TensorBytes* b) {
    return element_bytes(a->dtype) > element_bytes(b->dtype);
  });
  if (sealed) order.push_back(&last);

  std::unordered_set<std::string_view> names;
  std::vector<StoredTensor> stored;
  uint64_t end = 0;
  for (const TensorBytes* t : order) {
    check_tensor(path, *t);
    if (!names.insert(t->name).second) misuse(path, "name", fmt::format("{} stands twice", shown(t->name)));
    stored.push_back({t->name, t->dtype, t->shape, end, t->bytes.size()});
    end += t->bytes.size();
  }
  const std::string header = header_text(path, stored, metadata);
  const uint64_t header_bytes = header.size();
  if (header_bytes > kMaxHeaderBytes)
    misuse(path, "header_bytes", fmt::format("is {}; at most {} is allowed", header_bytes, kMaxHeaderBytes));

  LockedReplacement file(path, options);
  file.reached("opened");
  ChunkedWriter stream(file, sizeof header_bytes + header_bytes + end, sealed);
  stream.put(std::as_bytes(std::span(&header_bytes, 1)));
  stream.put(std::as_bytes(std::span(header)));
  for (const TensorBytes* t : order) {
    if (t == &last) check = stream.hash();
    stream.put(t->bytes);
  }
  file.reached("written");
  file.finish();
}

}  // namespace gradwire::io
