// SPDX-License-Identifier: Apache-2.0
// The writing of files. The new contents go to a temporary file in the same folder; finish() flushes it to the disk,
// renames it over the old file and flushes the folder, so that the name survives a power cut. Until then, and after any
// failure, the old file is untouched.
//
// A path may name something else than a file, and a rename would put a file in its place. A symbolic link stays: the
// file that it leads to is replaced, or made. A device or a pipe is refused, or written to where the caller says so. A
// folder or a socket is refused.
//
//   FileReplacement file("state.bin");
//   file.write(head);
//   file.write(body);
//   file.finish();
//
//   replace_file("state.json", as_bytes(std::span(text)));   // the same in one call
//
// Every function throws Error{io} that names the path. A FileReplacement belongs to one thread; several of them, also
// for the same path, may be used at once, and the last one to finish wins.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace gradwire {

// What becomes of a path that names a device or a pipe.
enum class SpecialFile { refuse, write_to };

class FileReplacement {
 public:
  explicit FileReplacement(std::string path, SpecialFile special = SpecialFile::refuse);
  ~FileReplacement();  // removes the temporary file unless finish() has renamed it
  FileReplacement(const FileReplacement&) = delete;
  FileReplacement& operator=(const FileReplacement&) = delete;

  void write(std::span<const std::byte> bytes);
  void finish();  // once, and last

  // For a handler of signals that removes it; empty where a device or a pipe is written to.
  const std::string& temporary() const { return temporary_; }
  int descriptor() const { return file_; }

 private:
  std::string path_;       // as given, for errors
  std::string place_;      // what it leads to
  std::string temporary_;  // beside place_
  int file_ = -1;
};

void replace_file(const std::string& path, std::span<const std::byte> bytes);

// Where a path leads: the end of a chain of symbolic links, whether something is there or not. The links of /proc, such
// as those behind /dev/stdout, name an open file and not a place: the chain ends before them.
std::string place_of(const std::string& path);

// Flushes the entries of `folder` to the disk; without this a rename may be undone by a power cut.
void flush_folder(const std::string& folder);

// Throws Error{io} with the text of errno: "<path>: cannot <what>: <why>".
[[noreturn]] void throw_errno(const std::string& path, const char* what, const char* field);

}  // namespace gradwire
