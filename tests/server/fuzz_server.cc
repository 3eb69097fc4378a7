// SPDX-License-Identifier: Apache-2.0
// libFuzzer throws bytes at what the server reads from connections (the head of a frame, a worker's signature) and from
// disk: a safetensors file (of anybody, for first weights) and its own checkpoint, as the bytes come and with the check
// at the end made right, so that the fields behind it are reached. Only gradwire::Error may come out; another
// exception, a sanitizer's report or a broken promise (trap) is a finding.
//
// What does not look like a file is the text of a header, or a change of some bytes in an honest checkpoint: the first
// byte chooses. JSON of any depth is made from a few bytes.
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "gradwire/error.h"
#include "io/safetensors.h"
#include "server/checkpoint.h"
#include "server/frame.h"
#include "server/signature.h"
#include "support/fuzz_source.h"

namespace {

using namespace gradwire;
using namespace gradwire::server;
using namespace gradwire::fuzz;

// A file in memory, and a path that opens it.
class MemoryFile {
 public:
  MemoryFile() : file_(::memfd_create("server", MFD_CLOEXEC)), path_("/proc/self/fd/" + std::to_string(file_)) {}
  const std::string& path() const { return path_; }
  void set(const std::string& bytes) const {
    promise(::ftruncate(file_, 0) == 0 &&
            ::pwrite(file_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  }

 private:
  int file_;
  std::string path_;
};

void read_all(const std::string& path) {
  try {
    const SafetensorsFile file(path);
    uint64_t end = 0;
    for (const StoredTensor& tensor : file.tensors()) {
      promise(tensor.first == end && file.read(tensor).size() == tensor.bytes);
      end += tensor.bytes;
      try {
        promise(file.read_f32(tensor).size() * element_bytes(tensor.dtype) == tensor.bytes);
      } catch (const Error& e) {
        promise(e.kind() == (SafetensorsFile::is_float(tensor) ? ErrorKind::frame : ErrorKind::unsupported));
      }
    }
    promise(end <= file.file_bytes());
  } catch (const Error& e) {
    promise(e.kind() == ErrorKind::frame && !e.field().empty());
  }
}

void load(const std::string& path) {
  try {
    const ServerState state = load_state(path);
    for (const WorkerRow& row : state.workers) promise(row.computed.size() == row.sequence.size());
    for (const auto& array : state.weights) promise(!array.name.starts_with("gradwire."));
  } catch (const Error& e) {
    promise(e.kind() == ErrorKind::frame && !e.field().empty());
    promise(std::strchr(e.what(), '\n') == nullptr);
  }
}

void take(std::string bytes) {
  static const MemoryFile file;
  file.set(bytes);
  read_all(file.path());
  load(file.path());
  if (bytes.size() < 8) return;
  const uint64_t check = XXH3_64bits(bytes.data(), bytes.size() - 8);
  std::memcpy(bytes.data() + bytes.size() - 8, &check, sizeof check);
  file.set(bytes);
  load(file.path());
}

std::string with_length(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + std::string(data_bytes, '\0');
}

// Header and state text as save_state writes them.
std::string honest_checkpoint() {
  const std::string header =
      R"({"__metadata__":{"format":"gradwire server state","step":"7","version":"1"},)"
      R"("w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"e":{"dtype":"F32","shape":[0],"data_offsets":[8,8]},)"
      R"("gradwire.m":{"dtype":"F32","shape":[],"data_offsets":[8,12]},)"
      R"("gradwire.state":{"dtype":"U8","shape":[248],"data_offsets":[12,260]},)"
      R"("gradwire.check":{"dtype":"U8","shape":[8],"data_offsets":[260,268]}})";
  std::string state =
      R"({"step":7,"signature":{"a":[1.5,"x"]},"extra":null,"weights":["w"],"buffers":["e"],"others":["gradwire.m"],)"
      R"("workers":[{"id":"a","name":"b","left":true,"sequence":[3],"computed":["3ff0000000000000"],)"
      R"("residual":["0000000000000001"],"extra":{}}]})";
  promise(state.size() <= 248);
  state.resize(248, ' ');
  return with_length(header, 12) + state + std::string(8, '\0');
}

void fuzz_mutated(const uint8_t* data, size_t size) {
  static const std::string honest = [] {
    std::string bytes = honest_checkpoint();
    const uint64_t check = XXH3_64bits(bytes.data(), bytes.size() - 8);
    std::memcpy(bytes.data() + bytes.size() - 8, &check, sizeof check);
    const MemoryFile file;
    file.set(bytes);
    promise(load_state(file.path()).step == 7);  // what is honest is taken
    return bytes;
  }();
  std::string bytes = honest;
  // Each range of input: where (2 bytes), how many bytes give way (1), how many come (1), and those.
  while (size >= 4) {
    const size_t at = (data[0] | data[1] << 8) % (bytes.size() + 1);
    const size_t gone = std::min<size_t>(data[2] % 32, bytes.size() - at),
                 come = std::min<size_t>(data[3] % 32, size - 4);
    bytes.replace(at, gone, reinterpret_cast<const char*>(data) + 4, come);
    data += 4 + come;
    size -= 4 + come;
  }
  take(bytes);
}

void fuzz_safetensors(const uint8_t* data, size_t size) {
  if (size == 0) return;
  const std::string rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 4) {
    case 0:
      take(rest);
      break;
    case 1:  // a header, and as much data as its first byte says
      take(with_length(rest, rest.empty() ? 0 : data[1]));
      break;
    case 2:  // the objects of a header
      take(with_length("{" + rest + "}", 8));
      break;
    default:
      fuzz_mutated(data + 1, size - 1);
      break;
  }
}

// What comes over a connection: a frame's head, as it is and with its check made right, and what a worker says it
// trains.
void fuzz_frame(const uint8_t* data, size_t size) {
  std::array<std::byte, kFrameHead> head{};
  if (size > 0) std::memcpy(head.data(), data, std::min(size, head.size()));
  for (const bool sealed : {false, true}) {
    if (sealed) {
      const uint64_t check = XXH64(head.data(), 88, 0);
      std::memcpy(head.data() + 88, &check, sizeof check);
    }
    try {
      const Frame frame = read_frame_head(std::span(head).first(std::min(size, head.size())), size);
      promise(read_frame_head(write_head(frame, size), size).step == frame.step);
    } catch (const Error& error) {
      promise(error.kind() == ErrorKind::frame);
    }
  }
}

void fuzz_signature(const uint8_t* data, size_t size) {
  try {
    const Signature signature = Signature::parse(read_text(std::as_bytes(std::span(data, size))));
    check_limits(signature, {.max_elements = 1 << 20, .max_tensors = 64});
    promise(Signature::parse(signature.json()).difference(signature).empty());
    uint64_t elements = 0;
    for (const ShardLayout& layout : shard_layouts(signature, 32768))
      elements += layout.role == ShardRole::weights ? layout.elements() : 0;
    promise(elements == signature.elements());
  } catch (const Error& error) {
    promise(error.kind() == ErrorKind::frame || error.kind() == ErrorKind::usage);
  }
}

// Texts of any depth, as a signature, and as the header and the state of a file.
void fuzz_nested(Source source) {
  const auto where = source.next<uint8_t>();
  const std::string text = nested_json(source);
  if (where % 3 == 0) return fuzz_signature(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  if (where % 3 == 1) return take(with_length(text, where));
  std::string bytes = honest_checkpoint();
  const size_t header = bytes.find('}', bytes.find("gradwire.check")) + 2;
  bytes.replace(header + 12, 248, text.substr(0, 248));  // its state
  take(bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // The last byte chooses, so that a file stays a file.
  const uint8_t way = size > 0 ? data[size - 1] % 5 : 0;
  if (way == 1)
    fuzz_frame(data, size - 1);
  else if (way == 2)
    fuzz_signature(data, size - 1);
  else if (way == 4)
    fuzz_nested({data, size - 1});
  else
    fuzz_safetensors(data, size);
  return 0;
}
