// SPDX-License-Identifier: Apache-2.0
// Promises of core/file.h: old contents or new ones, never a mixture, and nothing left behind.
#include "core/file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "gradwire/error.h"

namespace gradwire {
namespace {

namespace fs = std::filesystem;

class ReplacedFile : public testing::Test {
 protected:
  ReplacedFile() : folder_(fs::temp_directory_path() / ("gradwire_file_test." + std::to_string(::getpid()))) {
    fs::create_directory(folder_);
  }
  ~ReplacedFile() override { fs::remove_all(folder_); }

  std::string path(const char* name) const { return (folder_ / name).string(); }
  static std::span<const std::byte> bytes(const std::string& text) { return std::as_bytes(std::span(text)); }
  static std::string contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  size_t files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator{}));
  }

 private:
  fs::path folder_;
};

TEST_F(ReplacedFile, TheOldContentsStayUntilTheNewOnesAreComplete) {
  replace_file(path("a"), bytes("old"));
  EXPECT_EQ(contents(path("a")), "old");
  {
    FileReplacement file(path("a"));
    file.write(bytes("new"));
    EXPECT_EQ(contents(path("a")), "old");
    file.write(bytes("er"));
    file.finish();
    EXPECT_EQ(contents(path("a")), "newer");
  }
  EXPECT_EQ(files(), 1u);
}

TEST_F(ReplacedFile, WhatIsNotFinishedLeavesNothingBehind) {
  replace_file(path("a"), bytes("old"));
  {
    FileReplacement file(path("a"));
    file.write(bytes("new"));
  }
  EXPECT_EQ(contents(path("a")), "old");
  EXPECT_EQ(files(), 1u);
}

TEST_F(ReplacedFile, OnlyRegularFilesAreReplaced) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  fs::create_directory(path("folder"));
  for (const char* name : {"pipe", "folder"}) {
    try {
      replace_file(path(name), bytes("x"));
      ADD_FAILURE() << name << " was replaced";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::io);
      EXPECT_EQ(error.field(), "path");
      EXPECT_NE(std::string(error.what()).find(path(name)), std::string::npos) << error.what();
    }
  }
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
  EXPECT_EQ(files(), 2u);
}

TEST_F(ReplacedFile, AFolderThatDoesNotExistIsNamed) {
  try {
    replace_file(path("none/a"), bytes("x"));
    ADD_FAILURE() << "written";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::io);
    EXPECT_NE(std::string(error.what()).find(path("none/a")), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace gradwire
