// SPDX-License-Identifier: Apache-2.0
// What the server stores comes back bit for bit, and nothing else is taken for it: not a file with any byte changed,
// not one that is truncated anywhere, not a malformed one whose check is right. The last are made by editing the header
// or the state text of an honest file and sealing it again.
#include <gtest/gtest.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include <functional>

#include "server/server_store_fixture.h"

namespace {

using namespace store_fixture;
using nlohmann::json;

std::string field_of(const std::string& path) {
  return refused(ErrorKind::frame, path, [&] { load_state(path); });
}

// A safetensors file taken apart.
struct SplitSafetensors {
  json header;
  std::string data;

  explicit SplitSafetensors(const std::string& file) {
    uint64_t length;
    std::memcpy(&length, file.data(), sizeof length);
    header = json::parse(file.substr(8, length));
    data = file.substr(8 + length);
  }
  std::string join() const { return join(header.dump()); }
  std::string join(const std::string& text) const {
    const uint64_t length = text.size();
    return resealed(std::string(reinterpret_cast<const char*>(&length), sizeof length) + text + data);
  }
  std::string state() const {
    const json& at = header["gradwire.state"]["data_offsets"];
    return data.substr(at[0], at[1].get<size_t>() - at[0].get<size_t>());
  }
  // The state text is the last but the check; offsets and shape follow its length.
  void set_state(const std::string& text) {
    const size_t first = header["gradwire.state"]["data_offsets"][0], end = first + text.size();
    data = data.substr(0, first) + text + std::string(8, '\0');
    header["gradwire.state"] = {{"dtype", "U8"}, {"shape", {text.size()}}, {"data_offsets", {first, end}}};
    header["gradwire.check"]["data_offsets"] = {end, end + 8};
  }
};

class Store : public testing::Test {
 protected:
  std::string saved() {
    save_state(path, small_state());
    return read_file(path);
  }
  std::string malformed(const std::function<void(json& header)>& change) {
    SplitSafetensors parts(honest);
    change(parts.header);
    write_file(path, parts.join());
    return field_of(path);
  }
  std::string malformed_state(const std::function<void(json& state)>& change) {
    SplitSafetensors parts(honest);
    json state = json::parse(parts.state());
    change(state);
    parts.set_state(state.dump());
    write_file(path, parts.join());
    return field_of(path);
  }

  Folder folder;
  const std::string path = folder / "ps.gwc";
  const std::string honest = saved();
};

TEST_F(Store, AStateComesBackBitForBit) {
  EXPECT_TRUE(same(load_state(path), small_state()));
  EXPECT_FALSE(same(load_state(path), small_state(8)));
  const ServerState empty;
  save_state(path, empty);
  EXPECT_TRUE(same(load_state(path), empty));
}

TEST_F(Store, TheSameStateIsTheSameBytes) {
  save_state(folder / "again", small_state());
  EXPECT_EQ(read_file(folder / "again"), honest);
}

TEST_F(Store, TensorsStandInTheOrderGivenAndAligned) {
  const SafetensorsFile file(path);
  std::vector<std::string> names;
  for (const StoredTensor& t : file.tensors()) {
    names.push_back(t.name);
    EXPECT_EQ(t.first % element_bytes(t.dtype), 0u);
  }
  const std::vector<std::string> expected = {"z.weight",      "a \"quoted\"\n名前", "nothing",
                                             "signalling",    "bn.running_mean",    "also nothing",
                                             "gradwire.mean", "gradwire.state",     "gradwire.check"};
  EXPECT_EQ(names, expected);
  EXPECT_EQ(file.metadata(), (Metadata{{"format", "gradwire server state"}, {"version", "1"}, {"step", "7"}}));
  EXPECT_EQ(file.find("nothing")->shape, (std::vector<int64_t>{3, 0, 2}));
  EXPECT_EQ(file.find("nobody"), nullptr);
}

TEST_F(Store, WideElementsAreStoredFirst) {
  const std::vector<uint16_t> halves = {0x3c00, 0x0001, 0xfc00};  // 1, 2^-24, -Inf
  const std::vector<double> wide = {0.1, -1e-46};
  const std::byte one{1};
  write_safetensors(path, std::vector<TensorBytes>{{"byte", "U8", {1}, {&one, 1}},
                                                   {"half", "F16", {3}, std::as_bytes(std::span(halves))},
                                                   {"brain", "BF16", {3}, std::as_bytes(std::span(halves))},
                                                   {"wide", "F64", {2}, std::as_bytes(std::span(wide))}});
  const SafetensorsFile file(path);
  EXPECT_EQ(file.tensors().front().name, "wide");
  EXPECT_EQ(file.tensors().back().name, "byte");
  EXPECT_TRUE(same_bits(file.read_f32(*file.find("wide")), {0.1f, -0.0f}));
  EXPECT_TRUE(same_bits(
      file.read_f32(*file.find("brain")),
      {std::bit_cast<float>(0x3c000000u), std::bit_cast<float>(0x10000u), std::bit_cast<float>(0xfc000000u)}));
  EXPECT_EQ(file.read(*file.find("byte")), std::vector<std::byte>{one});
#if defined(__SSE__)
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040);  // flush to zero, denormals are zero: as trainers set it
#endif
  const std::vector<float> read = file.read_f32(*file.find("half"));
#if defined(__SSE__)
  _mm_setcsr(mode);
#endif
  EXPECT_TRUE(same_bits(read, {1.0f, 0x1p-24f, -INFINITY}));
  EXPECT_EQ(refused(ErrorKind::unsupported, path, [&] { file.read_f32(*file.find("byte")); }), "dtype");
}

TEST_F(Store, ADoubleBeyondFloatIsRefusedNotTurnedIntoInfinity) {
  const std::vector<double> wide = {1, 1e39};
  write_safetensors(path, std::vector<TensorBytes>{{"w", "F64", {2}, std::as_bytes(std::span(wide))}});
  const SafetensorsFile file(path);
  EXPECT_EQ(refused(ErrorKind::frame, path, [&] { file.read_f32(file.tensors()[0]); }), "data");
}

TEST_F(Store, AnyChangedByteIsRefused) {
  for (size_t i = 0; i < honest.size(); ++i)
    for (const int change : {0x01, 0x20, 0x80, 0xff}) {
      std::string file = honest;
      file[i] = static_cast<char>(file[i] ^ change);
      write_file(path, file);
      ASSERT_NE(field_of(path), "(taken)") << "byte " << i << " ^ " << change;
    }
}

TEST_F(Store, AFileCutAnywhereOrWithMoreBehindItIsRefused) {
  for (size_t length = 0; length < honest.size(); ++length) {
    write_file(path, honest.substr(0, length));
    ASSERT_NE(field_of(path), "(taken)") << length;
    if (length < 8) continue;
    write_file(path, resealed(honest.substr(0, length)));
    ASSERT_NE(field_of(path), "(taken)") << length << " resealed";
  }
  write_file(path, honest + '\0');
  EXPECT_EQ(field_of(path), "file_bytes");
  write_file(path, resealed(honest + std::string(8, ' ')));
  EXPECT_EQ(field_of(path), "file_bytes");
}

TEST_F(Store, AnyChangedByteOfHeaderOrStateUnderARightCheckIsRefusedOrMeansAnotherState) {
  // Nothing but Error may come out; what is taken must be saved again as it was read.
  const SplitSafetensors parts(honest);
  const size_t header = honest.size() - parts.data.size(), state = honest.size() - 8 - parts.state().size();
  size_t taken = 0;
  for (size_t i = 0; i + 8 < honest.size(); ++i) {
    if (i >= header && i < state) continue;
    for (const int change : {0x01, 0x04, 0x10}) {
      std::string file = honest;
      file[i] = static_cast<char>(file[i] ^ change);
      write_file(path, resealed(file));
      try {
        const ServerState read = load_state(path);
        if (++taken % 16 != 1) continue;  // each save waits for the disk
        save_state(folder / "again", read);
        ASSERT_TRUE(same(load_state(folder / "again"), read)) << i;
      } catch (const Error& error) {
        ASSERT_EQ(error.kind(), ErrorKind::frame) << error.what();
      }
    }
  }
  EXPECT_GT(taken, 0u);  // e.g. a digit of a sequence number
}

TEST_F(Store, HeadersThatLieAreRefusedByField) {
  EXPECT_EQ(malformed([](json&) {}), "(taken)");
  const auto weight = [](json& header) -> json& { return header["z.weight"]; };
  EXPECT_EQ(malformed([&](json& h) { weight(h)["dtype"] = "F33"; }), "dtype");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["dtype"] = 4; }), "dtype");
  EXPECT_EQ(malformed([&](json& h) { weight(h).erase("dtype"); }), "dtype");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["dtype"] = "I32"; }), "weights");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["shape"] = {2, 3}; }), "data_offsets");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["shape"] = {2, -2}; }), "shape");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["shape"] = {2, 2.0}; }), "shape");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["shape"] = {{2}, 2}; }), "shape");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["shape"] = "4"; }), "shape");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["shape"] = {uint64_t{1} << 32, uint64_t{1} << 32, 4}; }), "shape");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["shape"] = {uint64_t{1} << 63}; }), "shape");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["shape"] = std::vector<int>(65, 1); }), "shape");
  EXPECT_EQ(malformed([&](json& h) { h["nothing"]["shape"] = {0, uint64_t{1} << 62, 4}; }), "shape");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["data_offsets"] = {0}; }), "data_offsets");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["data_offsets"] = {0, 16, 16}; }), "data_offsets");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["data_offsets"] = {16, 0}; }), "data_offsets");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["data_offsets"] = {4, 20}; }), "data_offsets");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["data_offsets"] = {UINT64_MAX - 15, UINT64_MAX}; }), "data_offsets");
  EXPECT_EQ(malformed([&](json& h) { h["signalling"]["data_offsets"] = {16, 24}; }), "data_offsets");  // overlaps
  EXPECT_EQ(malformed([&](json& h) { weight(h)["data_offsets"] = nullptr; }), "data_offsets");
  EXPECT_EQ(malformed([&](json& h) { weight(h)["also"] = 1; }), "header");
  EXPECT_EQ(malformed([&](json& h) { weight(h) = 1; }), "header");
  EXPECT_EQ(malformed([&](json& h) { h.erase("z.weight"); }), "data_offsets");
  EXPECT_EQ(malformed([&](json& h) { h["__metadata__"]["step"] = 7; }), "__metadata__");
  EXPECT_EQ(malformed([&](json& h) { h["__metadata__"] = {1}; }), "__metadata__");
  EXPECT_EQ(malformed([&](json& h) { h["__metadata__"]["step"] = "8"; }), "__metadata__");
  EXPECT_EQ(malformed([&](json& h) { h["__metadata__"]["version"] = "2"; }), "version");
  EXPECT_EQ(malformed([&](json& h) { h["__metadata__"].erase("version"); }), "version");
  EXPECT_EQ(malformed([&](json& h) { h["__metadata__"]["format"] = "pt"; }), "format");
  EXPECT_EQ(malformed([&](json& h) { h.erase("__metadata__"); }), "format");
  EXPECT_EQ(malformed([&](json& h) { h["gradwire.check"]["dtype"] = "I8"; }), "gradwire.check");
  EXPECT_EQ(malformed([&](json& h) {
              h["other"] = h["gradwire.check"];
              h.erase("gradwire.check");
            }),
            "gradwire.check");
  EXPECT_EQ(malformed([&](json& h) {
              h["other"] = h["gradwire.state"];
              h.erase("gradwire.state");
            }),
            "gradwire.state");
}

TEST_F(Store, HeadersThatAreNotTheFormatAreRefused) {
  const SplitSafetensors parts(honest);
  const std::string text = parts.header.dump();
  const auto with = [&](const std::string& header) {
    write_file(path, parts.join(header));
    return field_of(path);
  };
  EXPECT_EQ(with(text), "(taken)");
  EXPECT_EQ(with(text + "   "), "(taken)");
  EXPECT_EQ(with(" " + text), "header");
  EXPECT_EQ(with("\xef\xbb\xbf" + text), "header");
  EXPECT_EQ(with(text + std::string(1, '\0')), "header");
  EXPECT_EQ(with(text + "}"), "header");
  EXPECT_EQ(with(""), "header");
  EXPECT_EQ(with("[" + text + "]"), "header");
  EXPECT_EQ(with(text.substr(0, text.size() - 1) + ",\"x\xff\":{}}"), "header");
  EXPECT_EQ(with(text.substr(0, text.size() - 1) + ",\"\\ud800\":{}}"), "header");
  EXPECT_EQ(with(text.substr(0, text.size() - 1) + ",\"x\":" + std::string(100000, '[')), "header");
  const std::string entry = "\"nothing\":" + parts.header["nothing"].dump();
  EXPECT_EQ(with(text.substr(0, text.size() - 1) + "," + entry + "}"), "name");
  EXPECT_EQ(with(text.substr(0, text.size() - 1) + ",\"__metadata__\":{}}"), "name");
  EXPECT_EQ(with("{\"x\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}"), "header");
  EXPECT_EQ(with("{\"__metadata__\":{\"a\":\"b\",\"a\":\"b\"}}"), "__metadata__");
  EXPECT_EQ(with("{}"), "file_bytes");
  std::string file = honest;
  for (const uint64_t length : {uint64_t{1} << 63, uint64_t{honest.size()} - 7, UINT64_MAX, UINT64_MAX - 7}) {
    std::memcpy(file.data(), &length, sizeof length);
    write_file(path, resealed(file));
    EXPECT_EQ(field_of(path), "header_bytes") << length;
  }
}

TEST_F(Store, AHeaderAboveTheLimitIsRefusedBeforeItIsRead) {
  const uint64_t length = kMaxHeaderBytes + 1;
  write_file(path, std::string(reinterpret_cast<const char*>(&length), sizeof length));
  fs::resize_file(path, length + 100);  // a hole: takes no space
  EXPECT_EQ(field_of(path), "header_bytes");
}

TEST_F(Store, StateTextsThatLieAreRefusedByField) {
  EXPECT_EQ(malformed_state([](json&) {}), "(taken)");
  EXPECT_EQ(malformed_state([](json& s) { s["step"] = -1; }), "step");
  EXPECT_EQ(malformed_state([](json& s) { s["step"] = 7.0; }), "step");
  EXPECT_EQ(malformed_state([](json& s) { s["step"] = 8; }), "__metadata__");
  EXPECT_EQ(malformed_state([](json& s) { s.erase("step"); }), "gradwire.state");
  EXPECT_EQ(malformed_state([](json& s) { s["more"] = 1; }), "gradwire.state");
  EXPECT_EQ(malformed_state([](json& s) { s = json::array(); }), "gradwire.state");
  EXPECT_EQ(malformed_state([](json& s) { s["signature"] = "x"; }), "signature");
  EXPECT_EQ(malformed_state([](json& s) { s["workers"] = json::object(); }), "workers");
  EXPECT_EQ(malformed_state([](json& s) { s["workers"][1] = 3; }), "workers[1]");
  EXPECT_EQ(malformed_state([](json& s) { s["workers"][1]["id"] = "id-1"; }), "workers");
  EXPECT_EQ(malformed_state([](json& s) { s["workers"][1]["id"] = 1; }), "workers[1].id");
  EXPECT_EQ(malformed_state([](json& s) { s["workers"][1].erase("name"); }), "workers[1]");
  EXPECT_EQ(malformed_state([](json& s) { s["workers"][0]["left"] = 0; }), "workers[0].left");
  EXPECT_EQ(malformed_state([](json& s) { s["workers"][0]["sequence"] = 1; }), "workers[0].sequence");
  EXPECT_EQ(malformed_state([](json& s) { s["workers"][0]["sequence"][1] = -1; }), "workers[0].sequence");
  EXPECT_EQ(malformed_state([](json& s) { s["workers"][0]["sequence"].push_back(1); }), "workers[0]");
  EXPECT_EQ(malformed_state([](json& s) { s["workers"][0]["computed"][0] = 0.5; }), "workers[0].computed");
  EXPECT_EQ(malformed_state([](json& s) { s["workers"][0]["residual"][0] = "0x00000000000000"; }),
            "workers[0].residual");
  EXPECT_EQ(malformed_state([](json& s) { s["workers"][0]["residual"].clear(); }), "workers[0]");
  EXPECT_EQ(malformed_state([](json& s) { s["weights"].erase(0); }), "gradwire.state");
  EXPECT_EQ(malformed_state([](json& s) { s["weights"][0] = "nobody"; }), "weights");
  EXPECT_EQ(malformed_state([](json& s) { s["weights"][0] = 5; }), "weights");
  EXPECT_EQ(malformed_state([](json& s) { s["buffers"].push_back("z.weight"); }), "buffers");
  EXPECT_EQ(malformed_state([](json& s) { s["weights"].push_back("gradwire.mean"); }), "weights");
  EXPECT_EQ(malformed_state([](json& s) { s["others"].push_back("gradwire.state"); }), "others");
  EXPECT_EQ(malformed_state([](json& s) {
              s["others"].push_back("nothing");
              s["weights"].erase(2);
            }),
            "others");
}

TEST_F(Store, StateTextsThatAreNotStrictJsonAreRefused) {
  const std::string text = SplitSafetensors(honest).state();
  const size_t brace = text.find_last_of('}');
  for (const std::string& malformed :
       {text.substr(0, brace), text + "{}", text + std::string(1, '\0'), std::string(),
        text.substr(0, brace) + ",\"step\":7}", text.substr(0, brace) + ",\"x\":1e999}",
        "{\"x\":" + std::string(1000000, '['), text.substr(0, brace) + ",\"x\":\"\xc0\x80\"}"}) {
    SplitSafetensors parts(honest);
    parts.set_state(malformed);
    write_file(path, parts.join());
    EXPECT_EQ(field_of(path), "gradwire.state") << malformed.substr(0, 100);
  }
}

TEST_F(Store, AForeignSafetensorsFileIsReadAsTensorsButIsNoState) {
  const std::vector<float> values = {1, 2};
  write_safetensors(path, std::vector<TensorBytes>{{"w", "F32", {2}, std::as_bytes(std::span(values))}});
  EXPECT_EQ(field_of(path), "format");
  const SafetensorsFile file(path);
  EXPECT_EQ(file.read_f32(file.tensors()[0]), values);
  EXPECT_EQ(file.file_bytes() % 8, 0u);
}

TEST_F(Store, WhatCannotComeBackIsRefusedAtSaveAndTheFileStays) {
  const auto field = [&](const std::function<void(ServerState&)>& change) {
    ServerState state = small_state(9);
    change(state);
    const std::string result = refused(ErrorKind::usage, path, [&] { save_state(path, state); });
    EXPECT_EQ(read_file(path), honest);
    EXPECT_EQ(folder.names(), (std::set<std::string>{"ps.gwc"}));
    return result;
  };
  EXPECT_EQ(field([](auto& s) { s.weights[0].name = "gradwire.weight"; }), "name");
  EXPECT_EQ(field([](auto& s) { s.buffers[0].name = "gradwire.check"; }), "name");
  EXPECT_EQ(field([](auto& s) { s.others[0].name = "mean"; }), "name");
  EXPECT_EQ(field([](auto& s) { s.others[0].name = "gradwire.state"; }), "name");
  EXPECT_EQ(field([](auto& s) { s.weights[0].name = "__metadata__"; }), "name");
  EXPECT_EQ(field([](auto& s) { s.weights[0].name = "nothing"; }), "name");
  EXPECT_EQ(field([](auto& s) { s.weights[0].name = "\xff"; }), "name");
  EXPECT_EQ(field([](auto& s) { s.weights[0].shape = {5}; }), "bytes");
  EXPECT_EQ(field([](auto& s) { s.weights[0].shape = {-2, -2}; }), "shape");
  EXPECT_EQ(field([](auto& s) { s.workers[1].id = s.workers[0].id; }), "workers");
  EXPECT_EQ(field([](auto& s) { s.workers[1].id = "\xc3"; }), "workers[1].id");
  EXPECT_EQ(field([](auto& s) { s.workers[1].name = "\xc3"; }), "workers[1].name");
  EXPECT_EQ(field([](auto& s) { s.workers[1].computed.pop_back(); }), "workers[1]");
  EXPECT_EQ(field([](auto& s) { s.workers[0].extra["x"] = NAN; }), "workers[0].extra");
  EXPECT_EQ(field([](auto& s) { s.signature = nullptr; }), "signature");
  EXPECT_EQ(field([](auto& s) { s.signature["x"] = INFINITY; }), "signature");
  EXPECT_EQ(field([](auto& s) { s.signature["\xff"] = 1; }), "signature");
  EXPECT_EQ(field([](auto& s) { s.extra = json::binary({1}); }), "extra");
}

TEST_F(Store, OpaqueJsonComesBackAsDeepAsItIsAllowedAtSave) {
  for (const size_t place : {0, 1}) {
    size_t deepest = 0;
    for (size_t depth = 1; depth <= kMaxJsonDepth + 1; ++depth) {
      ServerState state = small_state();
      json nested = 1;
      for (size_t i = 0; i < depth; ++i) nested = json::array({nested});
      (place == 0 ? state.extra : state.workers[0].extra) = nested;
      try {
        save_state(path, state);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::usage);
        break;
      }
      ASSERT_TRUE(same(load_state(path), state)) << depth;
      deepest = depth;
    }
    EXPECT_GE(deepest, 50u);
    EXPECT_LT(deepest, kMaxJsonDepth);
  }
}

}  // namespace
