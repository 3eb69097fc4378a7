// SPDX-License-Identifier: Apache-2.0
// Writes the golden frames of golden.h to a folder:
//
//   make_golden tests/wire/golden
//
//   NAME.gw         the message
//   NAME.in.f32     what was encoded: all tensors, one after another, as raw little-endian f32
//   NAME.f32        what it decodes to, alike
//   manifest.json   what every message carries. "large" ones have no .f32 files, only the rule of golden.h and hashes
//
// It is run when frames are added. Where a file changes that stood there before, the format has changed, and that needs
// a new version number.
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "wire/golden.h"

namespace {

void write(const std::string& path, const void* data, size_t bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  if (!file.flush()) {
    std::fprintf(stderr, "cannot write %s\n", path.c_str());
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_golden FOLDER\n");
    return 2;
  }
  const std::string folder = std::string(argv[1]) + "/";
  const gradwire::Device scalar{.simd = "scalar"};  // the reference loop
  for (const golden::GoldenCase& c : golden::cases()) {
    const gradwire::Plan plan(golden::specs(c));
    const std::vector<std::byte> message = golden::encode(c, plan, scalar);
    write(folder + c.name + ".gw", message.data(), message.size());
    if (c.large) continue;
    const std::vector<float> in = golden::inputs(c), out = golden::decode(message, golden::specs(c), scalar);
    write(folder + c.name + ".in.f32", in.data(), in.size() * sizeof(float));
    write(folder + c.name + ".f32", out.data(), out.size() * sizeof(float));
  }
  const std::string text = golden::manifest(golden::cases());
  write(folder + "manifest.json", text.data(), text.size());
}
