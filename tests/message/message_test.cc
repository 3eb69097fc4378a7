// SPDX-License-Identifier: Apache-2.0
// The wire format as a promise: the golden frames of golden.h are encoded again to the same bytes and decoded to the
// same floats by every vector target; cut at any byte or flipped at any bit they are refused, and with the checksums
// made right again they are refused by name or are another well-formed message. malformed_test.cc has the rules of each
// single field.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <regex>
#include <sstream>

#include "message/layout.h"
#include "message/message_builder.h"
#include "wire/golden.h"

namespace gradwire::test {
namespace {

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string golden_text(const std::string& name) {
  return read_text(std::string(GRADWIRE_TEST_DIR) + "/wire/golden/" + name);
}

ByteVector golden_frame(const golden::GoldenCase& c) {
  const std::string text = golden_text(c.name + ".gw");
  ByteVector bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

std::string raw(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

std::vector<Device> devices() {
  std::vector<Device> all = {{.simd = "scalar"}, {.threads = 3}};
  for (const std::string& simd : simd_targets()) all.push_back({.simd = simd});
  return all;
}

// Longer frames are sampled; odd steps meet every place in a byte.
uint64_t bit_step(const ByteVector& frame) { return frame.size() > 4000 ? 7 : frame.size() > 800 ? 5 : 1; }

TEST(Golden, ManifestNamesEveryFrame) { EXPECT_EQ(golden_text("manifest.json"), golden::manifest(golden::cases())); }

TEST(Golden, InputIsWhatTheRuleSays) {
  for (const golden::GoldenCase& c : golden::cases())
    if (!c.large) {
      EXPECT_EQ(golden_text(c.name + ".in.f32"), raw(golden::inputs(c))) << c.name;
    }
}

TEST(Golden, EncodesToTheSameBytesOnEveryTarget) {
  for (const Device& device : devices())
    for (const golden::GoldenCase& c : golden::cases())
      EXPECT_EQ(golden::encode(c, Plan(golden::specs(c)), device), golden_frame(c)) << c.name << ' ' << device.simd;
}

TEST(Golden, DecodesToTheSameFloatsOnEveryTarget) {
  for (const Device& device : devices())
    for (const golden::GoldenCase& c : golden::cases()) {
      const std::vector<float> decoded = golden::decode(golden_frame(c), golden::specs(c), device);
      if (c.large)
        EXPECT_NE(
            golden_text("manifest.json").find(fmt::format("\"decoded_xxh64\": \"{:016x}\"", golden::hash(decoded))),
            std::string::npos)
            << c.name;
      else
        EXPECT_EQ(raw(decoded), golden_text(c.name + ".f32")) << c.name << ' ' << device.simd;
    }
}

TEST(Golden, HeadSaysWhatWasEncoded) {
  for (const golden::GoldenCase& c : golden::cases()) {
    const ByteVector message = golden_frame(c);
    const Head head = read_head(message);
    EXPECT_EQ(head.stamp.step, c.stamp.step);
    EXPECT_EQ(head.stamp.stage, c.stamp.stage);
    EXPECT_EQ(head.stamp.rank, c.stamp.rank);
    EXPECT_EQ(head.stamp.world, c.stamp.world);
    ASSERT_EQ(head.tensors.size(), c.tensors.size()) << c.name;
    for (size_t i = 0; i < c.tensors.size(); ++i) {
      const TensorSpec &got = head.tensors[i], &want = c.tensors[i].spec;
      EXPECT_EQ(*got.name_hash, hash_name(want.name));
      EXPECT_EQ(got.count, want.count);
      EXPECT_EQ(got.first, want.first);
      EXPECT_EQ(got.dtype, want.dtype);
      EXPECT_EQ(got.codec.wire_spec(), want.codec.wire_spec());
      EXPECT_TRUE(std::ranges::equal(got.codec.table(), want.codec.table()));
      EXPECT_EQ(got.shape, want.shape);
    }
  }
}

// Every cut is copied to memory of its own size, so that AddressSanitizer sees a read beyond it.
TEST(Damage, EveryCutIsRefused) {
  for (const golden::GoldenCase& c : golden::cases()) {
    const ByteVector whole = golden_frame(c);
    for (size_t size = 0; size < whole.size(); size += bit_step(whole)) {
      ByteVector cut(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size));
      ASSERT_NE(refused_field([&] { read_message(cut); }), "") << c.name << " cut to " << size;
      if (size < header::size) continue;
      put_field(std::span(cut), header::total_bytes, uint64_t{size});
      reseal(cut);
      ASSERT_NE(refused_field([&] { read_message(cut); }), "") << c.name << " cut to " << size << " and resealed";
    }
  }
}

TEST(Damage, EveryLongerMessageIsRefused) {
  for (const golden::GoldenCase& c : golden::cases())
    for (const size_t more : {1, 4, 32, 128}) {
      ByteVector longer = golden_frame(c);
      longer.resize(longer.size() + more);
      ASSERT_EQ(refused_field([&] { read_message(longer); }), "total_bytes") << c.name;
      put_field(std::span(longer), header::total_bytes, uint64_t{longer.size()});
      reseal(longer);
      ASSERT_NE(refused_field([&] { read_message(longer); }), "") << c.name;
    }
}

TEST(Damage, EveryFlippedBitIsRefused) {
  for (const golden::GoldenCase& c : golden::cases()) {
    ByteVector message = golden_frame(c);
    const Head head = read_head(message);
    const Plan plan(golden::specs(c));
    const auto runner = make_runner(plan, Device{});
    std::vector<float> scratch(plan.elements());
    std::vector<void*> outputs(c.tensors.size(), scratch.data());  // nothing may be written
    for (uint64_t bit = 0; bit < message.size() * 8; bit += bit_step(message)) {
      std::byte& byte = message[bit / 8];
      const std::byte flip = std::byte{1} << (bit % 8);
      byte ^= flip;
      ASSERT_NE(refused_field([&] { runner->decode(message, outputs); }), "") << c.name << " bit " << bit;
      ASSERT_NE(refused_field([&] { verify_body(message, read_head(message)); }), "") << c.name << " bit " << bit;
      byte ^= flip;
    }
    for (float value : scratch) ASSERT_EQ(value, 0.0f) << c.name;
  }
}

// Where a resealed flip is taken, it is another well-formed message: its head reads back as the plan it makes.
TEST(Damage, EveryResealedFlipIsRefusedByNameOrWellFormed) {
  uint64_t taken = 0, refused = 0;
  for (const golden::GoldenCase& c : golden::cases()) {
    const ByteVector whole = golden_frame(c);
    const size_t head_bytes = get_field<uint32_t>(whole, header::head_bytes);
    const Plan plan(read_head(whole).tensors);
    const auto runner = make_runner(plan, Device{});
    std::vector<ByteVector> tensors;
    std::vector<void*> outputs;
    for (const TensorSpec& t : plan.tensors())
      outputs.push_back(tensors.emplace_back(t.count * bytes_of(t.dtype)).data());
    ByteVector message = whole;
    for (uint64_t bit = 0; bit < whole.size() * 8; bit += bit_step(whole)) {
      message[bit / 8] ^= std::byte{1} << (bit % 8);
      reseal(message);
      // The head of a flipped body is as it was, and so are plan and runner.
      const std::string field = refused_field([&] {
        if (bit / 8 < head_bytes)
          read_message(message);
        else
          runner->decode(message, outputs);
      });
      ++(field.empty() ? taken : refused);
      if (field.empty()) {
        ASSERT_EQ(Plan(read_head(message).tensors).message_bytes(), message.size()) << c.name << " bit " << bit;
      }
      message[bit / 8] = whole[bit / 8];
      std::memcpy(message.data() + header::head_check, whole.data() + header::head_check, 16);
    }
  }
  EXPECT_GT(taken, 10000u);
  EXPECT_GT(refused, 10000u);
}

// --- other versions ----------------------------------------------------------------------------------------------

TEST(Versions, AMessageOfVersionOneIsRefusedByItsVersion) {
  for (const char* name : {"fp32_1", "optquant_fitted3", "mixed"}) {
    const std::string text = read_text(std::string(GRADWIRE_TEST_DIR) + "/wire/version1/" + name + ".gw");
    ByteVector old(text.size());
    std::memcpy(old.data(), text.data(), text.size());
    ASSERT_GT(old.size(), size_t{header::size}) << name;
    try {
      read_head(old);
      ADD_FAILURE() << name << " was taken";
    } catch (const Error& e) {
      EXPECT_EQ(e.field(), "version");
      EXPECT_NE(std::string(e.what()).find("version is 1; this library reads 2"), std::string::npos) << e.what();
    }
  }
}

// --- what sender and receiver need not share ---------------------------------------------------------------------

// A parameter of another value than its default, whatever its type.
Codec with_another_value(const Codec& codec, const ParameterInfo& p) {
  for (const char* value : {"1", "2", "3", "0.5", "entropy", "convex", "rate", "paper"}) try {
      if (value != p.fallback) return codec.with(p.name, value);
    } catch (const Error&) {
    }
  ADD_FAILURE() << "no other value of " << p.name << " is known: " << p.allowed;
  return codec;
}

// If a learning option could change a message, adding one would make older messages unreadable.
TEST(Learning, OptionsLeaveNoTraceInAMessage) {
  size_t options = 0;
  for (const CodecInfo& info : codecs()) {
    const Codec plain = Codec::parse(info.name);
    EXPECT_EQ(Codec::parse_wire(plain.wire_spec()).wire_spec(), plain.wire_spec());
    const ByteVector message = MessageBuilder(plain, 1100).bytes;
    for (const ParameterInfo& p : info.parameters) {
      if (!p.learning) continue;
      ++options;
      const Codec other = with_another_value(plain, p);
      EXPECT_NE(other.str(), plain.str());
      EXPECT_EQ(MessageBuilder(other, 1100).bytes, message) << other.str();
      EXPECT_EQ(read_head(message).tensors[0].codec, plain);
      // A receiver that learns in another way takes the message as well.
      const Plan plan({{"w", 1100, DType::f32, other}});
      std::vector<float> out(1100);
      void* outputs[] = {out.data()};
      EXPECT_EQ(refused_field([&] { make_runner(plan, Device{})->decode(message, outputs); }), "") << other.str();
    }
  }
  EXPECT_GE(options, 16u);
}

TEST(Learning, WireSpecsAreTheSameAsWhenVersionTwoBegan) {
  const std::vector<std::pair<const char*, const char*>> known = {
      {"optquant:workers=4", "optquant:bits=4,bucket=1024,mode=unbiased,kappa=0.5"},
      {"dqsgd:steps=9,mode=paper", "dqsgd:budget=4,min=2,max=16,norm=max,bucket=1024"},
      {"rangefloat:refit=0", "rangefloat:bits=8,mantissa=0,min=0,max=0,eps=0,mode=round,scale=bucket,bucket=1024"},
      {"casq:cut=0.5", "casq:bits=2,budget=0.0625,mode=tile,counts=off"},
      {"fft:until=3", "fft:theta=0.85,chunk=1024,format=range,bits=10,mantissa=0,mode=round"},
      {"qsgd", "qsgd:bits=4,bucket=1024,norm=max,rounding=random"},
      {"fp32", "fp32"}};
  for (const auto& [spec, wire] : known) EXPECT_EQ(Codec::parse(spec).wire_spec(), wire);
}

// --- what a receiver expects -------------------------------------------------------------------------------------

struct Receiver : testing::Test {
  std::vector<TensorSpec> tensors = {{"a", 1500, DType::f32, Codec::parse("qsgd")},
                                     {"b", 40, DType::f32, Codec::parse("fp32")}};
  MessageBuilder message{tensors};
  const Stamp stamp{.step = 7, .stage = 1, .rank = 2, .world = 5};
  std::vector<float> out = std::vector<float>(4000);

  std::string field(const std::vector<TensorSpec>& expected, const Stamp* stamped = nullptr) {
    const Plan plan(expected);
    std::vector<void*> outputs(expected.size(), out.data());
    return refused_field([&] { make_runner(plan, Device{})->decode(message.bytes, outputs, Write::set, stamped); });
  }
};

TEST_F(Receiver, TakesItsOwnPlanAndStamp) { EXPECT_EQ(field(tensors, &stamp), ""); }

TEST_F(Receiver, TakesAnotherElementType) {
  tensors[0].dtype = DType::f16;
  tensors[1].dtype = DType::bf16;
  EXPECT_EQ(field(tensors, &stamp), "");
}

TEST_F(Receiver, NamesTheFieldOfTheStampThatDiffers) {
  Stamp other = stamp;
  other.step = 8;
  EXPECT_EQ(field(tensors, &other), "step");
  other = stamp;
  other.stage = 0;
  EXPECT_EQ(field(tensors, &other), "stage");
  other = stamp;
  other.rank = 1;
  EXPECT_EQ(field(tensors, &other), "rank");
  other = stamp;
  other.world = 6;
  EXPECT_EQ(field(tensors, &other), "world");
  other = stamp;
  other.seed = 99;  // does not travel
  EXPECT_EQ(field(tensors, &other), "");
}

TEST_F(Receiver, NamesTheFieldOfTheTableThatDiffers) {
  auto expected = tensors;
  expected[1].name = "c";
  EXPECT_EQ(field(expected), "tensor[1].name_hash");
  expected = tensors;
  expected[0].count = 1499;  // of the same size in bytes: 1500 and 1499 codes of 4 bits end in the same word
  EXPECT_EQ(field(expected), "tensor[0].count");
  expected = tensors;
  expected[0].first = 32768;
  EXPECT_EQ(field(expected), "tensor[0].first");
  expected = tensors;
  expected[0].codec = Codec::parse("qsgd:bits=4,norm=l2,rounding=nearest");
  EXPECT_EQ(field(expected), "tensor[0].spec");
  expected = tensors;
  expected.push_back({"none", 0, DType::f32, Codec::parse("fp32")});
  EXPECT_EQ(field(expected), "total_bytes");  // another row, another size
}

TEST_F(Receiver, NamesTheShapeThatDiffers) {
  tensors[0].shape = {30, 50};
  message = MessageBuilder(tensors);
  EXPECT_EQ(field(tensors), "");
  auto expected = tensors;
  expected[0].shape = {50, 30};
  EXPECT_EQ(field(expected), "tensor[0].shape");
}

TEST(Shapes, APlanRefusesAShapeThatDoesNotFit) {
  const std::vector<std::vector<uint64_t>> bad = {{5},
                                                  {2, 4},
                                                  {6, 0},
                                                  {7, 1},
                                                  std::vector<uint64_t>(9, 1),
                                                  {uint64_t{1} << 41},
                                                  {uint64_t{1} << 32, uint64_t{1} << 32}};
  for (const auto& shape : bad) try {
      Plan({{.name = "w", .count = 6, .codec = Codec(), .shape = shape}});
      ADD_FAILURE() << shape.size() << " dimensions were taken";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::usage);
      EXPECT_EQ(e.field(), "shape");
    }
  EXPECT_NO_THROW(Plan({{.name = "w", .count = 6, .codec = Codec(), .shape = {1, 2, 3}}}));
  EXPECT_NO_THROW(Plan({{.name = "w", .count = 0, .codec = Codec(), .shape = {1u << 30, 0}}}));
}

TEST_F(Receiver, NamesTheNumberOfTensors) {
  // A row less and 8 elements more: messages of the same size, so that only the number of rows tells.
  std::vector<TensorSpec> three(3, {"x", 1, DType::f32, Codec()}), two = three;
  two.pop_back();
  two[0].count = 10;
  ASSERT_EQ(Plan(three).message_bytes(), Plan(two).message_bytes());
  message = MessageBuilder(three);
  EXPECT_EQ(field(two), "tensor_count");
  message = MessageBuilder(two);
  EXPECT_EQ(field(three), "tensor_count");
}

TEST_F(Receiver, NamesTheSizeOfABufferThatDoesNotFit) {
  message.bytes.pop_back();
  EXPECT_EQ(field(tensors), "total_bytes");
  message.bytes.resize(message.bytes.size() + 2);
  EXPECT_EQ(field(tensors), "total_bytes");
}

TEST_F(Receiver, RefusesAMisalignedBuffer) {
  const Plan plan(tensors);
  std::vector<void*> outputs(2, out.data());
  std::vector<const void*> inputs(2, out.data());
  ByteVector shifted(message.bytes.size() + 1);
  std::memcpy(shifted.data() + 1, message.bytes.data(), message.bytes.size());
  const auto runner = make_runner(plan, Device{});
  const auto misaligned = std::span(shifted).subspan(1);
  for (const bool encode : {false, true}) try {
      if (encode)
        runner->encode(inputs, stamp, misaligned);
      else
        runner->decode(misaligned, outputs);
      ADD_FAILURE() << "taken";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::usage);
      EXPECT_EQ(e.field(), "message");
    }
}

TEST_F(Receiver, RefusesAnotherNumberOfPointers) {
  const Plan plan(tensors);
  std::vector<void*> outputs(1, out.data());
  try {
    make_runner(plan, Device{})->decode(message.bytes, outputs);
    ADD_FAILURE() << "taken";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    EXPECT_EQ(e.field(), "tensors");
  }
}

// --- the document ------------------------------------------------------------------------------------------------

struct Document : testing::Test {
  const std::string text = read_text(std::string(GRADWIRE_TEST_DIR) + "/../docs/wire-format.md");
  size_t found = 0;
};

TEST_F(Document, ExamplesAreWhatTheProgramWrites) {
  const float values[] = {0.5f, -1.25f, 3.0f, 0.0f, -0.001f};
  const void* inputs[] = {values};
  for (const char* spec : {"fp32", "fp16", "bf16", "qsgd", "terngrad", "onebit", "topk:ratio=0.4"}) {
    const Plan plan({{"w", 5, DType::f32, Codec::parse(spec)}});
    ByteVector message(plan.message_bytes());
    make_runner(plan, Device{})->encode(inputs, {.seed = 1, .step = 7}, message);
    const size_t begin = text.find("```\n", text.find(fmt::format(" {}\n\n```", plan.tensors()[0].codec.name())));
    ASSERT_NE(begin, std::string::npos) << spec;
    std::istringstream dump(text.substr(begin + 4, text.find("```", begin + 4) - begin - 4));
    ByteVector shown;
    for (std::string line; std::getline(dump, line);) {  // "0040  04 00 00 00      what it means"
      ASSERT_EQ(std::stoul(line.substr(0, 4), nullptr, 16), shown.size()) << line;
      std::istringstream bytes(line.substr(4, 2 + 47));
      for (std::string byte; bytes >> byte;) shown.push_back(std::byte(std::stoul(byte, nullptr, 16)));
    }
    EXPECT_EQ(shown, message) << spec;
  }
}

TEST_F(Document, SizesAreThoseOfThePlan) {
  const std::regex row(R"(\| `([a-z0-9]+(?::[^`]*)?)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|)");
  for (std::sregex_iterator i(text.begin(), text.end(), row), end; i != end; ++i, ++found) {
    const Codec codec = Codec::parse((*i)[1].str());
    const std::vector<std::pair<int, uint64_t>> columns = {{3, 5}, {4, 1000}, {5, 1000000}};
    for (const auto& [column, count] : columns) {
      EXPECT_EQ(codec.bytes(count), std::stoull((*i)[column].str())) << codec.str();
      EXPECT_EQ(bound(codec, count), std::stoull((*i)[2].str()) + codec.bytes(count)) << codec.str();
    }
  }
  EXPECT_EQ(found, 29u);
}

}  // namespace
}  // namespace gradwire::test
