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
#include <thread>

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

TEST_F(ReplacedFile, ALinkStaysAndTheFileThatItLeadsToIsReplaced) {
  fs::create_directory(path("folder"));
  replace_file(path("folder/real"), bytes("old"));
  fs::create_symlink("real", path("folder/near"));      // relative to the folder of the link
  fs::create_symlink("folder/near", path("far"));       // a chain of two
  fs::create_symlink("folder/later", path("nothing"));  // leads to nothing yet
  replace_file(path("far"), bytes("new"));
  EXPECT_EQ(contents(path("folder/real")), "new");
  replace_file(path("nothing"), bytes("made"));
  EXPECT_EQ(contents(path("folder/later")), "made");
  for (const char* link : {"far", "nothing", "folder/near"}) EXPECT_TRUE(fs::is_symlink(path(link))) << link;
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(path("folder/real"))));
  EXPECT_EQ(files(), 3u) << "a temporary file stands beside the target, and not beside the link";
}

TEST_F(ReplacedFile, LinksThatLeadInACircleAreRefused) {
  fs::create_symlink("b", path("a"));
  fs::create_symlink("a", path("b"));
  EXPECT_THROW(replace_file(path("a"), bytes("x")), Error);
  EXPECT_TRUE(fs::is_symlink(path("a")));
  EXPECT_EQ(files(), 2u);
}

TEST_F(ReplacedFile, ALinkToADeviceIsRefusedOrWrittenThrough) {
  fs::create_symlink("/dev/null", path("null"));
  EXPECT_THROW(replace_file(path("null"), bytes("x")), Error);
  FileReplacement file(path("null"), SpecialFile::write_to);
  EXPECT_TRUE(file.temporary().empty());
  file.write(bytes("x"));
  file.finish();
  EXPECT_TRUE(fs::is_symlink(path("null")));
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST_F(ReplacedFile, APipeIsWrittenToIfTheCallerSaysSo) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  std::string read;
  std::thread reader([&] { read = contents(path("pipe")); });
  {
    FileReplacement file(path("pipe"), SpecialFile::write_to);
    file.write(bytes("through"));
    file.finish();
  }
  reader.join();
  EXPECT_EQ(read, "through");
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
  fs::create_directory(path("folder"));
  EXPECT_THROW(FileReplacement(path("folder"), SpecialFile::write_to), Error);
}

TEST_F(ReplacedFile, TheNewFileIsReadableByWhomTheOldOneWas) {
  replace_file(path("secret"), bytes("old"));
  fs::permissions(path("secret"), fs::perms::owner_read | fs::perms::owner_write);
  replace_file(path("secret"), bytes("new"));
  EXPECT_EQ(fs::status(path("secret")).permissions(), fs::perms::owner_read | fs::perms::owner_write);
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
