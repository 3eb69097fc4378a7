// SPDX-License-Identifier: Apache-2.0
// What the tests of the server's store share: a folder of their own, files as bytes, a small state with everything in
// it that is awkward to store, and an equality that looks at bits.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <xxhash.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "gradwire/error.h"
#include "io/json.h"
#include "server/checkpoint.h"

namespace store_fixture {

using namespace gradwire;
using namespace gradwire::server;
namespace fs = std::filesystem;

class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "gradwire-store-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  const fs::path& path() const { return path_; }
  std::set<std::string> names() const {
    std::set<std::string> result;
    for (const auto& entry : fs::directory_iterator(path_)) result.insert(entry.path().filename().string());
    return result;
  }

 private:
  fs::path path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}
inline void write_file(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << content;
}

// Makes the check at the end right again, so that only the rule in question can refuse a malformed file.
inline std::string resealed(std::string file) {
  const uint64_t check = XXH3_64bits(file.data(), file.size() - 8);
  std::memcpy(file.data() + file.size() - 8, &check, sizeof check);
  return file;
}

inline ServerState small_state(uint64_t step = 7) {
  ServerState state;
  state.step = step;
  state.signature = {{"up", "loggrid:k=2"}, {"rate", 0.1}, {"tiny", 5e-324}, {"minus", -0.0}, {"big", UINT64_MAX}};
  state.extra = {{"mode", "sync"}, {"list", {1, -2, nullptr, true}}};
  using FloatLimits = std::numeric_limits<float>;
  const auto bits = [](uint32_t b) { return std::bit_cast<float>(b); };
  state.weights = {{"z.weight", {2, 2}, {1.0f, -0.0f, FloatLimits::denorm_min(), -FloatLimits::infinity()}},
                   {"a \"quoted\"\n名前", {}, {bits(0x7fc12345)}},
                   {"nothing", {3, 0, 2}, {}},
                   {"signalling", {2}, {bits(0x7f800001), bits(0xffffffff)}}};
  state.buffers = {{"bn.running_mean", {3}, {0.1f, 0.2f, static_cast<float>(step)}}, {"also nothing", {0}, {}}};
  state.others = {{"gradwire.mean", {1, 1}, {FloatLimits::max()}}};
  const double nan = std::bit_cast<double>(uint64_t{0x7ff0dead0000beef});
  state.workers = {{"id-1", "Grüße", false, {1, UINT64_MAX}, {0.1, nan}, {-0.0, 5e-324}, {{"lag", 3}}},
                   {"id-0", "", true, {0, step}, {1e308, -INFINITY}, {0, 1.0 / 3}, nullptr},
                   {"no parts", "x", false, {}, {}, {}, "text"}};
  return state;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

inline bool same(const std::vector<StoredArray>& a, const std::vector<StoredArray>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.name == y.name && x.shape == y.shape && same_bits(x.values, y.values);
  });
}

inline bool same(const WorkerRow& a, const WorkerRow& b) {
  return a.id == b.id && a.name == b.name && a.left == b.left && a.sequence == b.sequence &&
         same_bits(a.computed, b.computed) && same_bits(a.residual, b.residual) && a.extra.dump() == b.extra.dump();
}

// The JSON's text is compared: it shows the sign of a zero.
inline bool same(const ServerState& a, const ServerState& b) {
  return a.step == b.step && a.signature.dump() == b.signature.dump() && a.extra.dump() == b.extra.dump() &&
         same(a.weights, b.weights) && same(a.buffers, b.buffers) && same(a.others, b.others) &&
         std::equal(a.workers.begin(), a.workers.end(), b.workers.begin(), b.workers.end(),
                    [](const WorkerRow& x, const WorkerRow& y) { return same(x, y); });
}

// The field that an Error of this kind names; a message of one line that begins with the path is expected.
template <class Work>
std::string refused(ErrorKind kind, const std::string& path, Work work) {
  try {
    work();
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_EQ(error.kind(), kind) << what;
    EXPECT_EQ(what.rfind(path, 0), 0u) << what;
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
    EXPECT_FALSE(error.field().empty()) << what;
    return error.field();
  }
  return "(taken)";
}

}  // namespace store_fixture
