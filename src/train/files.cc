// SPDX-License-Identifier: Apache-2.0
// Reading through zlib, which passes plain files on as they are and checks gzip's length and checksum. A gzip stream
// cannot expand by more than 1032 to 1 (deflate's limit), so the size of the file bounds what it may claim; a claim
// within the bound still gets memory only as bytes arrive.
#include "train/files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "gradwire/error.h"

namespace gradwire::train {
namespace {

constexpr uint64_t kExpansion = 1032;
constexpr size_t kChunk = size_t{4} << 20;

// Opening a pipe or a terminal would wait for ever, so only regular files are read.
uint64_t regular_size(const DataPlace& place, const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) missing(place, path, "a file");
  if (!std::filesystem::is_regular_file(status)) missing(place, path, "a regular file");
  const uint64_t size = std::filesystem::file_size(path, error);
  if (error) unreadable(place, path, error.message());
  return size;
}

}  // namespace

void missing(const DataPlace& place, const std::string& path, const std::string& expected) {
  throw Error(ErrorKind::io, fmt::format("{}: not there; expected {}; {}", path, expected, place.advice), "data");
}

void unreadable(const DataPlace& place, const std::string& path, const std::string& reason) {
  throw Error(ErrorKind::io, fmt::format("{}: cannot be read: {}; {}", path, reason, place.advice), "data");
}

void damaged(const DataPlace& place, const std::string& path, const std::string& field, const std::string& found,
             const std::string& expected) {
  throw Error(ErrorKind::frame,
              fmt::format("{}: {} is {}; expected {}; {}", path, field, found, expected, place.advice), field);
}

std::string find_file(const DataPlace& place, const std::vector<std::string>& names) {
  std::error_code error;
  const std::filesystem::path root(place.directory);
  if (!std::filesystem::is_directory(root, error))
    missing(place, place.directory, fmt::format("a directory with {}", names.front()));
  std::vector<std::filesystem::path> folders{root};
  for (const std::string& folder : place.folders) folders.push_back(root / folder);
  for (const auto& folder : folders)
    for (const std::string& name : names)
      if (std::filesystem::is_regular_file(folder / name, error)) return (folder / name).string();
  missing(place, (root / names.front()).string(),
          names.size() > 1 ? fmt::format("one of {}", fmt::join(names, ", ")) : "a file");
}

std::vector<uint8_t> read_file(const DataPlace& place, const std::string& path, uint64_t most) {
  const uint64_t size = regular_size(place, path);
  if (size > most) damaged(place, path, "size", fmt::format("{} bytes", size), fmt::format("at most {}", most));
  std::ifstream file(path, std::ios::binary);
  if (!file) unreadable(place, path, std::strerror(errno));
  std::vector<uint8_t> bytes(size);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
  if (static_cast<uint64_t>(file.gcount()) != size)
    unreadable(place, path, fmt::format("{} of its {} bytes came", file.gcount(), size));
  return bytes;
}

ByteStream::ByteStream(const DataPlace& place, const std::string& path) : place_(place), path_(path) {
  most_ = regular_size(place, path);
  gzFile file = ::gzopen(path.c_str(), "rb");
  if (!file) unreadable(place, path, std::strerror(errno));
  file_ = file;
  ::gzbuffer(file, 1u << 18);
  if (!::gzdirect(file)) most_ *= kExpansion;
}

ByteStream::~ByteStream() { ::gzclose(static_cast<gzFile>(file_)); }

size_t ByteStream::fill(std::span<uint8_t> out) {
  const auto file = static_cast<gzFile>(file_);
  const int got = ::gzread(file, out.data(), static_cast<unsigned>(out.size()));
  int status = Z_OK;
  const char* reason = ::gzerror(file, &status);
  if (status == Z_ERRNO) unreadable(place_, path_, std::strerror(errno));
  if (got < 0 || (status != Z_OK && status != Z_STREAM_END)) {
    const std::string prefix = path_ + ": ";  // zlib names the file too
    std::string_view text(reason);
    if (text.starts_with(prefix)) text.remove_prefix(prefix.size());
    damaged(place_, path_, "gzip",
            fmt::format("damaged after {} bytes ({})", done_ + static_cast<uint64_t>(std::max(got, 0)), text),
            "a whole stream");
  }
  done_ += static_cast<uint64_t>(got);
  return static_cast<size_t>(got);
}

std::vector<uint8_t> ByteStream::read(uint64_t bytes) {
  if (bytes > most_)
    damaged(place_, path_, "size", fmt::format("at most {} bytes", most_),
            fmt::format("{} more after {}", bytes, done_));
  std::vector<uint8_t> out;
  while (out.size() < bytes) {
    const size_t had = out.size(), want = std::min<uint64_t>(kChunk, bytes - had);
    out.resize(had + want);
    const size_t got = fill(std::span(out).subspan(had));
    if (got < want)
      damaged(place_, path_, "size", fmt::format("{} bytes", done_), fmt::format("{}", done_ - got - had + bytes));
  }
  return out;
}

uint32_t ByteStream::read_big_endian() {
  const std::vector<uint8_t> b = read(4);
  return uint32_t{b[0]} << 24 | uint32_t{b[1]} << 16 | uint32_t{b[2]} << 8 | b[3];
}

void ByteStream::expect_end() {
  uint8_t extra = 0;
  const uint64_t size = done_;
  if (fill({&extra, 1}) != 0)
    damaged(place_, path_, "size", "larger than its own count says", fmt::format("{} bytes", size));
}

}  // namespace gradwire::train
