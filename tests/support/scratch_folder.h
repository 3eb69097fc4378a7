// SPDX-License-Identifier: Apache-2.0
// Files of a test program. They lie in one folder of this process in the temporary directory, and the folder goes with
// the process, whatever the tests left in it.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>
#include <string>

namespace gradwire {

class ScratchFolder {
 public:
  ScratchFolder() : owner_(::getpid()) {
    std::string name = (std::filesystem::temp_directory_path() / "gradwire_test_XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed for " + name);
    path_ = name;
  }
  ~ScratchFolder() {
    if (::getpid() != owner_) return;  // a child that a test forked: the parent still uses the folder
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  pid_t owner_;
  std::filesystem::path path_;
};

// A path at which nothing lies yet.
inline std::string scratch_file(const std::string& name) {
  static const ScratchFolder folder;
  const auto path = folder.path() / name;
  std::filesystem::remove_all(path);
  std::filesystem::remove(path.string() + ".old");
  return path.string();
}

}  // namespace gradwire
