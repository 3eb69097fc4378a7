// SPDX-License-Identifier: Apache-2.0
// Malformed messages with right checksums, a test for each rule of docs/wire-format.md section 9: the refusal must name
// the field. The largest block of memory that was asked for is watched too: no count may be believed before it is
// checked.
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cstdlib>
#include <new>

#include "core/bits.h"
#include "message/layout.h"
#include "message/message_builder.h"

namespace {
std::atomic<size_t> largest_block{0};
}  // namespace

// Not inlined: the compiler would see new and free meet, and warn.
[[gnu::noinline]] void* operator new(size_t bytes) {
  size_t seen = largest_block;
  while (bytes > seen && !largest_block.compare_exchange_weak(seen, bytes)) {
  }
  if (void* block = std::malloc(bytes ? bytes : 1)) return block;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* block) noexcept { std::free(block); }
[[gnu::noinline]] void operator delete(void* block, size_t) noexcept { std::free(block); }

namespace gradwire::test {
namespace {

constexpr uint32_t kInf = 0x7f800000u, kMinusInf = 0xff800000u, kMark = 0x7fc00000u, kMinusZero = 0x80000000u;
constexpr size_t kSpecAt = header::size;  // where the first spec stands
const std::vector<uint32_t> kBadFloats = {kInf, kMinusInf, 0x7fc00001u, 0x7f800001u, 0xffc00000u, 0xffffffffu};

MessageBuilder two_specs() {
  return MessageBuilder({{"a", 1500, DType::f32, Codec::parse("qsgd")},
                         {"b", 40, DType::f32, Codec()},
                         {"c", 1024, DType::f32, Codec::parse("qsgd")}});
}

TEST(Malformed, TheUnalteredMessageIsTaken) {
  EXPECT_EQ(two_specs().field(), "");
  EXPECT_EQ(two_specs().set_specs({Codec::parse("qsgd").str(), "fp32"}).field(), "");
}

// --- header ------------------------------------------------------------------------------------------------------

TEST(Malformed, Magic) {
  EXPECT_EQ(MessageBuilder("fp32", 5).set<uint32_t>(header::magic, 0x52495748u).field(), "magic");
}

TEST(Malformed, Version) {
  for (uint16_t version : {0, 1, 3, 256, 65535})
    EXPECT_EQ(MessageBuilder("fp32", 5).set(header::version, version).field(), "version");
}

TEST(Malformed, Flags) {
  for (uint16_t flags : {1, 32768}) EXPECT_EQ(MessageBuilder("fp32", 5).set(header::flags, flags).field(), "flags");
}

TEST(Malformed, TotalBytes) {
  const uint64_t honest = MessageBuilder("fp32", 5).bytes.size();
  for (uint64_t total : {uint64_t{0}, uint64_t{63}, honest - 1, honest + 1, honest + (uint64_t{1} << 32), ~uint64_t{0}})
    EXPECT_EQ(MessageBuilder("fp32", 5).set(header::total_bytes, total).field(), "total_bytes");
}

TEST(Malformed, TotalBytesThatTheTensorsDoNotFill) {
  MessageBuilder message("fp32", 5);
  message.bytes.resize(message.bytes.size() + 4);
  EXPECT_EQ(message.set(header::total_bytes, uint64_t{message.bytes.size()}).field(), "total_bytes");
  message.bytes.resize(message.bytes.size() - 8);
  EXPECT_EQ(message.set(header::total_bytes, uint64_t{message.bytes.size()}).field(), "total_bytes");
}

TEST(Malformed, HeadBytes) {
  for (uint32_t bytes : {0u, 32u, 63u, 65u, 96u, 127u, 160u, 0x80000000u, 0xffffffe0u})
    EXPECT_EQ(MessageBuilder("fp32", 50).set(header::head_bytes, bytes).field(), "head_bytes") << bytes;
}

TEST(Malformed, PaddingOfTheHead) {
  MessageBuilder message("fp32", 5);
  EXPECT_EQ(message.set(message.head_bytes() - 1, uint8_t{1}).field(), "head_bytes");
}

TEST(Malformed, World) { EXPECT_EQ(MessageBuilder("fp32", 5).set<uint32_t>(header::world, 0).field(), "world"); }

TEST(Malformed, RankNotBelowWorld) {
  for (uint32_t rank : {5u, 6u, 0xffffffffu})
    EXPECT_EQ(MessageBuilder("fp32", 5).set(header::rank, rank).field(), "rank");
}

TEST(Malformed, RankNotBelowWorldForAKnownPlan) {
  MessageBuilder message("fp32", 5);
  const Plan plan({{"w", 5, DType::f32, Codec()}});
  float out[5];
  void* outputs[] = {out};
  const auto runner = make_runner(plan, Device{});
  for (const auto& [at, value] : {std::pair<size_t, uint32_t>{header::rank, 5}, {header::world, 0}}) {
    MessageBuilder altered = message;
    altered.set(at, value);
    reseal(altered.bytes);
    EXPECT_NE(refused_field([&] { runner->decode(altered.bytes, outputs); }), "");
  }
}

TEST(Malformed, SpecCount) {
  for (uint32_t count : {2u, 65536u, 0xffffffffu})
    EXPECT_EQ(MessageBuilder("fp32", 5).set(header::spec_count, count).field(), "spec_count");
  EXPECT_EQ(MessageBuilder("fp32", 5)
                .set<uint32_t>(header::spec_count, 70000)
                .set<uint32_t>(header::tensor_count, 70000)
                .field(),
            "spec_count");
  EXPECT_NE(MessageBuilder("fp32", 5).set<uint32_t>(header::spec_count, 0).field(),
            "");  // the spec is read as a row of the table
}

TEST(Malformed, TensorCount) {
  EXPECT_EQ(MessageBuilder("fp32", 5).set<uint32_t>(header::tensor_count, 0xffffffffu).field(), "tensor_count");
  EXPECT_EQ(MessageBuilder("fp32", 5).set<uint32_t>(header::tensor_count, (1u << 20) + 1).field(), "tensor_count");
  EXPECT_EQ(MessageBuilder("fp32", 5).set<uint32_t>(header::tensor_count, 1u << 20).field(), "head_bytes");
  EXPECT_EQ(two_specs().field({.max_tensors = 2}), "tensor_count");
}

// --- specs -------------------------------------------------------------------------------------------------------

TEST(Malformed, SpecTable) {
  // fp32 learns nothing; the four bytes after its spec are the first of the tensor's row.
  EXPECT_EQ(MessageBuilder("fp32", 5).set<uint16_t>(kSpecAt + wire::spec::table_bytes, 4).field(), "spec_table");
  for (uint16_t bytes : {1, 2, 3, 5})
    EXPECT_EQ(MessageBuilder("fp32", 5).set(kSpecAt + wire::spec::table_bytes, bytes).field(), "spec_table");
  EXPECT_EQ(MessageBuilder("fp32", 5).set<uint16_t>(kSpecAt + wire::spec::table_bytes, 65532).field(),
            "spec");  // beyond the head
}

TEST(Malformed, SpecBeyondTheHead) {
  for (uint16_t length : {61, 1000, 65535})
    EXPECT_EQ(MessageBuilder("fp32", 5).set(kSpecAt, length).field(), "spec") << length;
  // The last of several begins where the head ends.
  MessageBuilder many(std::vector<TensorSpec>(4, {"w", 1, DType::f32, Codec()}));
  EXPECT_EQ(many.set<uint32_t>(header::spec_count, 2)
                .set<uint16_t>(kSpecAt, static_cast<uint16_t>(many.head_bytes() - kSpecAt - wire::spec::text))
                .field(),
            "spec");
}

TEST(Malformed, SpecPadding) {
  MessageBuilder message("topk", 100);  // 24 + 1 characters
  const uint16_t length = get_field<uint16_t>(message.bytes, kSpecAt);
  ASSERT_NE(length % 4, 0);
  EXPECT_EQ(message.set(kSpecAt + wire::spec::text + length, uint8_t{1}).field(), "spec");
}

TEST(Malformed, SpecUnknownOrOutOfRange) {
  for (const char* text :
       {"", "fp", "fp33", "FP32", "fp32:", "fp32:bits=4", "qsgd:bits=9,bucket=1024,norm=max,rounding=random",
        "topk:ratio=0,mode=tile", "topk:ratio=2,mode=tile", "topk:ratio=nan,mode=tile", "topk:ratio=inf,mode=tile",
        "terngrad:clip=-1,mode=tile", "onebit:mode=whole"})
    EXPECT_EQ(MessageBuilder("fp32", 5).set_specs({text}).field(), "spec") << text;
  EXPECT_EQ(MessageBuilder("fp32", 5).set_specs({std::string("fp32\0", 5)}).field(), "spec");
  EXPECT_EQ(MessageBuilder("fp32", 5).set_specs({std::string(60000, 'x')}).field(), "spec");
}

TEST(Malformed, SpecNotCanonical) {
  for (const char* text :
       {"qsgd", "qsgd:bits=4", "qsgd:bucket=1024,bits=4,norm=max,rounding=random",
        "qsgd:bits=04,bucket=1024,norm=max,rounding=random", "qsgd:bits=4,bucket=1024,norm=max,rounding=random,",
        "qsgd:bits=4,bits=4,bucket=1024,norm=max,rounding=random"})
    EXPECT_EQ(MessageBuilder("qsgd", 5).set_specs({text}).field(), "spec") << text;
  for (const char* text : {"topk:ratio=0.010,mode=tile", "topk:ratio=1e-2,mode=tile", "topk:ratio=.01,mode=tile",
                           "topk:mode=tile,ratio=0.01", "topk:ratio=1.0,mode=tile"})
    EXPECT_EQ(MessageBuilder("topk", 5).set_specs({text}).field(), "spec") << text;
  for (const char* text :
       {"terngrad:clip=-0,mode=tile", "terngrad:clip=2.50,mode=tile", "terngrad:clip=+2.5,mode=tile"})
    EXPECT_EQ(MessageBuilder("terngrad", 5).set_specs({text}).field(), "spec") << text;
}

TEST(Malformed, SpecTwice) { EXPECT_EQ(two_specs().set_specs({"fp32", "fp32"}).field(), "spec"); }

TEST(Malformed, SpecUnused) {
  EXPECT_EQ(two_specs().set_specs({Codec::parse("qsgd").str(), "fp32", "onebit:mode=tile"}).field(), "spec_count");
}

TEST(Malformed, SpecOrder) {
  MessageBuilder message = two_specs();
  message.set_specs({"fp32", Codec::parse("qsgd").str()})
      .set_row<uint16_t>(0, row::spec, 1)
      .set_row<uint16_t>(1, row::spec, 0)
      .set_row<uint16_t>(2, row::spec, 1);
  EXPECT_EQ(message.field(), "tensor[0].spec");
}

TEST(Malformed, SpecNumber) {
  EXPECT_EQ(MessageBuilder("fp32", 5).set_row<uint16_t>(0, row::spec, 1).field(), "tensor[0].spec");
  EXPECT_EQ(two_specs().set_row<uint16_t>(2, row::spec, 0xffff).field(), "tensor[2].spec");
}

// Two spellings of one value would be two canonical forms; and no value may escape as another exception.
TEST(Specs, RealsHaveOneSpelling) {
  EXPECT_EQ(Codec::parse("terngrad:clip=-0").str(), "terngrad:clip=0,mode=tile");
  EXPECT_EQ(Codec::parse("terngrad:clip=1e-310").get("clip"), "1e-310");
  EXPECT_EQ(Codec::parse("topk:ratio=0.000001").str(), "topk:ratio=1e-06,mode=tile");
  EXPECT_EQ(Codec::parse("topk:ratio=1.000").str(), "topk:ratio=1,mode=tile");
}

// --- tensor table ------------------------------------------------------------------------------------------------

TEST(Malformed, Count) {
  for (uint64_t count : {(uint64_t{1} << 18) + 1, uint64_t{1} << 40, uint64_t{1} << 63, ~uint64_t{0}})
    EXPECT_EQ(MessageBuilder("fp32", 5).set_row(0, row::count, count).field(), "tensor[0].count") << count;
  EXPECT_EQ(MessageBuilder("fp32", 5).set_row<uint64_t>(0, row::count, 6).field(), "total_bytes");
  EXPECT_EQ(two_specs().set_row<uint64_t>(0, row::count, 1524).field(), "tensor[1].offset");
}

TEST(Malformed, CountsTogether) {
  EXPECT_EQ(two_specs().set_row<uint64_t>(2, row::count, 1025).field({.max_elements = 2564}), "tensor[2].count");
  EXPECT_EQ(two_specs().field({.max_elements = 2563}), "tensor[2].count");
  EXPECT_EQ(two_specs().field({.max_elements = 2564}), "");
}

TEST(Malformed, CountBeyondThirtyTwoBitIndices) {
  MessageBuilder message("topk:mode=paper", 5);
  EXPECT_EQ(message.set_row(0, row::count, uint64_t{1} << 32).field({}), "tensor[0].count");
}

TEST(Malformed, First) {
  for (uint64_t first : {uint64_t{1}, uint64_t{32767}, (uint64_t{1} << 40) + 32768, ~uint64_t{0}})
    EXPECT_EQ(MessageBuilder("fp32", 5).set_row(0, row::first, first).field(), "tensor[0].first") << first;
  EXPECT_EQ(MessageBuilder("fp32", 5).set_row(0, row::first, uint64_t{1} << 40).field(), "");
}

TEST(Malformed, Offset) {
  for (uint64_t offset : {uint64_t{1}, uint64_t{4}, ~uint64_t{3}})
    EXPECT_EQ(MessageBuilder("fp32", 5).set_row(0, row::offset, offset).field(), "tensor[0].offset");
  MessageBuilder message = two_specs();
  message.set_row(1, row::offset, get_field<uint64_t>(message.bytes, message.table_at() + row::size + row::offset) - 4);
  EXPECT_EQ(message.field(), "tensor[1].offset");
}

TEST(Malformed, DType) {
  for (uint8_t dtype : {3, 4, 255})
    EXPECT_EQ(MessageBuilder("fp32", 5).set_row(0, row::dtype, dtype).field(), "tensor[0].dtype");
}

TEST(Malformed, Reserved) {
  for (size_t at = row::reserved; at < row::size; ++at)
    EXPECT_EQ(MessageBuilder("fp32", 5).set_row(0, at, uint8_t{1}).field(), "tensor[0].reserved");
}

MessageBuilder shaped() {
  return MessageBuilder({{.name = "a", .count = 6, .codec = Codec(), .shape = {2, 3}},
                         {.name = "b", .count = 5, .codec = Codec()},
                         {.name = "c", .count = 0, .codec = Codec(), .shape = {0, 4}}});
}

TEST(Malformed, Dims) {
  EXPECT_EQ(shaped().field(), "");
  for (uint8_t dims : {9, 255}) EXPECT_EQ(shaped().set_row(0, row::dims, dims).field(), "tensor[0].dims");
  // Another number of dimensions that takes as many bytes after padding reads the shapes that follow.
  EXPECT_NE(shaped().set_row<uint8_t>(0, row::dims, 1).field(), "");
  EXPECT_EQ(shaped().set_row<uint8_t>(1, row::dims, 8).field(), "head_bytes");
}

TEST(Malformed, Shape) {
  const uint64_t big = uint64_t{1} << 40;
  const auto altered = [](uint32_t tensor, uint64_t first, uint64_t second) {
    MessageBuilder message = shaped();
    const size_t at = message.table_at() + 3 * row::size + tensor * 2 * wire::kExtentBytes;
    return message.set(at, first).set(at + wire::kExtentBytes, second).field();
  };
  EXPECT_EQ(altered(0, 3, 2), "") << "another shape of as many elements";
  EXPECT_EQ(altered(0, 6, 2), "tensor[0].shape");
  EXPECT_EQ(altered(0, 0, 3), "tensor[0].shape");
  EXPECT_EQ(altered(0, big * 2, 3), "tensor[0].shape");
  EXPECT_EQ(altered(0, uint64_t{1} << 63, 2), "tensor[0].shape") << "the product wraps to 0";
  EXPECT_EQ(altered(0, (~uint64_t{0} / 3) * 2 + 4, 3), "tensor[0].shape");
  EXPECT_EQ(altered(1, 5, 0), "");
  EXPECT_EQ(altered(1, big, 0), "");
  EXPECT_EQ(altered(1, big * 2, 0), "tensor[2].shape");
  EXPECT_EQ(altered(1, uint64_t{1} << 32, uint64_t{1} << 32), "tensor[2].shape");
}

TEST(Malformed, LearningParametersInASpec) {
  for (const char* text : {"optquant:bits=4,bucket=1024,mode=unbiased,kappa=0.5,workers=1,refit=100",
                           "optquant:bits=4,bucket=1024,mode=unbiased,kappa=0.5,refit=100"}) {
    MessageBuilder message("optquant", 40);
    message.set_specs({text});
    reseal(message.bytes);
    try {
      read_head(message.bytes);
      ADD_FAILURE() << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.field(), "spec");
      EXPECT_NE(std::string(e.what()).find("says how a sender learns"), std::string::npos) << e.what();
    }
  }
}

// Sums of counts and offsets would wrap; a reader's own limit does not help where it is larger than any message.
TEST(Malformed, CountsBeyondAllMessages) {
  const Limits none{.max_elements = ~uint64_t{0}};
  for (const uint64_t count : {kMaxElements + 1, uint64_t{1} << 62, ~uint64_t{0}})
    EXPECT_EQ(MessageBuilder("fp32", 5).set_row(0, row::count, count).field(none), "tensor[0].count") << count;
  MessageBuilder two({{"a", 0, DType::f32, Codec()}, {"b", 0, DType::f32, Codec()}});
  EXPECT_EQ(two.set_row(0, row::count, uint64_t{1} << 63).set_row(1, row::count, uint64_t{1} << 63).field(none),
            "tensor[0].count");
  MessageBuilder sum({{"a", 0, DType::f32, Codec::parse("dqsgd").fitted(std::vector<uint32_t>{0})},
                      {"b", 0, DType::f32, Codec::parse("dqsgd").fitted(std::vector<uint32_t>{0})}});
  EXPECT_EQ(sum.set_row(0, row::count, kMaxElements).set_row(1, row::count, uint64_t{1}).field(none),
            "tensor[1].count");
}

// --- memory ------------------------------------------------------------------------------------------------------

size_t largest_block_of(MessageBuilder& message, const Limits& limits) {
  reseal(message.bytes);
  largest_block = 0;
  refused_field([&] { read_head(message.bytes, limits); });
  return largest_block;
}

TEST(Memory, NoCountIsBelievedBeforeItIsChecked) {
  const auto check = [](MessageBuilder message) { EXPECT_LT(largest_block_of(message, {}), size_t{16} << 10); };
  for (const uint64_t count : {uint64_t{1} << 31, uint64_t{1} << 40, ~uint64_t{0}}) {
    for (const char* spec : {"fp32", "qsgd", "onebit:mode=paper", "topk", "topk:mode=paper"})
      check(MessageBuilder(spec, 5).set_row(0, row::count, count));
    check(MessageBuilder("fp32", 5).set(header::total_bytes, count));
  }
  for (const uint32_t count : {70000u, 1u << 20, 0xffffffffu}) {
    check(MessageBuilder("fp32", 5).set(header::spec_count, count).set(header::tensor_count, count));
    check(MessageBuilder("fp32", 5).set(header::tensor_count, count));
    check(MessageBuilder("fp32", 5).set(header::head_bytes, count / 32 * 32));
  }
  for (const uint16_t length : {10000, 65535}) check(MessageBuilder("fp32", 5).set(kSpecAt, length));
}

// An honest frame that decodes to far more than it holds: only the limit can refuse it, and does so before the memory.
TEST(Memory, TheLimitHoldsForHonestFramesToo) {
  MessageBuilder message("topk:ratio=0.000001,mode=paper", 1 << 20);
  ASSERT_LT(message.bytes.size(), 400u);
  EXPECT_EQ(message.field({.max_elements = (1 << 20) - 1}), "tensor[0].count");
  EXPECT_LT(largest_block_of(message, {.max_elements = (1 << 20) - 1}), size_t{16} << 10);
  EXPECT_EQ(message.field({.max_elements = 1 << 20}), "");
}

// --- body --------------------------------------------------------------------------------------------------------

TEST(Malformed, PaddingBetweenRegions) {
  MessageBuilder message({{"a", 1, DType::f32, Codec()}, {"b", 1024, DType::f32, Codec()}});
  for (uint64_t word : {1, 31}) EXPECT_EQ(MessageBuilder(message).set_word(word, 1).field(), "padding");
  EXPECT_EQ(MessageBuilder(message).set_word(0, 0x3f800000u).set_word(32, 0x3f800000u).field(), "");
}

TEST(Malformed, PaddingOfThePartialBlock) {
  for (const char* spec :
       {"fp16", "bf16", "qsgd:bits=3", "qsgd:bits=4", "qsgd:bits=7", "terngrad", "onebit", "onebit:mode=paper"})
    for (uint64_t count : {1, 5, 1029}) {
      const MessageBuilder honest(spec, count);
      const uint64_t bits = Codec::parse(spec).name() == "fp16" || Codec::parse(spec).name() == "bf16" ? 16
                            : Codec::parse(spec).name() == "qsgd"     ? std::stoul(Codec::parse(spec).get("bits"))
                            : Codec::parse(spec).name() == "terngrad" ? 2
                                                                      : 1;
      const uint64_t used = count % 1024 * bits, last = count / 1024 * 32 * bits + (used + 31) / 32 - 1;
      ASSERT_NE(used % 32, 0u);
      for (uint64_t bit : {used % 32, uint64_t{31}})
        EXPECT_EQ(MessageBuilder(honest).set_word(last, honest.word(last) | 1u << bit).field(), "padding")
            << spec << ' ' << count << " bit " << bit;
    }
}

TEST(Malformed, SideOfUniformCodecs) {
  for (const char* spec : {"qsgd:bucket=64", "qsgd", "qsgd:bucket=2048", "terngrad", "terngrad:mode=paper"})
    for (uint64_t count : {5, 1024, 3000}) {
      const MessageBuilder honest(spec, count);
      const uint64_t last = (honest.bytes.size() - honest.head_bytes()) / 4 - 1;
      auto bad = kBadFloats;
      bad.insert(bad.end(), {kMinusZero, 0xbf800000u, 0xff7fffffu, 0x80000001u});
      for (uint32_t side : bad)
        EXPECT_EQ(MessageBuilder(honest).set_word(last, side).field(), "scales") << spec << ' ' << side;
      for (uint32_t side : {0u, 1u, 0x7f7fffffu, kMark})
        EXPECT_EQ(MessageBuilder(honest).set_word(last, side).field(), "") << spec << ' ' << side;
    }
}

TEST(Malformed, SideOfOnebit) {
  for (const char* spec : {"onebit", "onebit:mode=paper"}) {
    const MessageBuilder honest(spec, 1030);
    const uint64_t first = (honest.bytes.size() - honest.head_bytes()) / 4 - 2, second = first + 1;
    for (uint32_t side : kBadFloats) {
      EXPECT_EQ(MessageBuilder(honest).set_word(first, side).field(), "scales") << side;
      EXPECT_EQ(MessageBuilder(honest).set_word(second, side).field(), "scales") << side;
    }
    for (uint32_t side : {kMinusZero, 0xbf800000u, kMark})
      EXPECT_EQ(MessageBuilder(honest).set_word(first, side).field(), "scales") << side;
    for (uint32_t side : {kMinusZero, 0x3f800000u, 1u, kMark})
      EXPECT_EQ(MessageBuilder(honest).set_word(second, side).field(), "scales") << side;
    EXPECT_EQ(MessageBuilder(honest).set_word(first, kMark).set_word(second, kMark).field(), "");
    EXPECT_EQ(MessageBuilder(honest).set_word(first, 0).set_word(second, 0).field(), "");
    EXPECT_EQ(MessageBuilder(honest).set_word(first, 0x7f7fffffu).set_word(second, 0xff7fffffu).field(), "");
  }
}

TEST(Malformed, CodesBeyondTheTopLevel) {
  for (uint32_t bits = 2; bits <= 8; ++bits)
    for (const uint64_t count : {5, 1024, 1029}) {
      const std::string spec = "qsgd:bits=" + std::to_string(bits);
      MessageBuilder message(spec, count);
      const uint64_t partial = count / 1024 * 32 * bits;  // element 1024's code, or element 0's
      const uint64_t word = count == 1024 ? 7 : partial;
      EXPECT_EQ(message.set_word(word, message.word(word) | ((1u << bits) - 1)).field(), "codes")
          << spec << ' ' << count;
    }
  for (const char* spec : {"terngrad", "terngrad:mode=paper", "qsgd:bits=2,bucket=64", "qsgd:bits=2,bucket=4096"}) {
    MessageBuilder message(spec, 5000);
    EXPECT_EQ(message.set_word(100, message.word(100) | 3u << 30).field(), "codes") << spec;
  }
}

TEST(Malformed, CodesOfCastsNotFinite) {
  for (const uint64_t count : {5, 1024}) {
    for (uint32_t code : kBadFloats)
      EXPECT_EQ(MessageBuilder("fp32", count).set_word(4, code).field(), "codes") << code;
    EXPECT_EQ(MessageBuilder("fp32", count).set_word(4, kMark).field(), "");
    for (uint32_t code : {0x7c00u, 0xfc00u, 0x7e01u, 0x7fffu, 0xfe00u, 0x7c01u})
      EXPECT_EQ(MessageBuilder("fp16", count).set_word(1, code << 16).field(), "codes") << code;
    EXPECT_EQ(MessageBuilder("fp16", count).set_word(1, 0x7e007bffu).field(), "");
    for (uint32_t code : {0x7f80u, 0xff80u, 0x7fc1u, 0x7fffu, 0xffc0u, 0x7f81u})
      EXPECT_EQ(MessageBuilder("bf16", count).set_word(1, code << 16).field(), "codes") << code;
    EXPECT_EQ(MessageBuilder("bf16", count).set_word(1, 0x7fc07f7fu).field(), "");
  }
}

// topk keeps 5 of 50: words 0-4 values, 5-7 indices, two a word; the upper half of word 7 is padding.
struct TopK : testing::Test {
  const MessageBuilder honest{"topk:ratio=0.1", 50};
  MessageBuilder indices(uint16_t a, uint16_t b, uint16_t c, uint16_t d, uint16_t e, uint16_t padding = 0) const {
    return MessageBuilder(honest)
        .set_word(5, a | uint32_t{b} << 16)
        .set_word(6, c | uint32_t{d} << 16)
        .set_word(7, e | uint32_t{padding} << 16);
  }
};

TEST_F(TopK, AnyAscendingIndicesAreTaken) {
  EXPECT_EQ(indices(0, 1, 2, 3, 4).field(), "");
  EXPECT_EQ(indices(3, 9, 20, 48, 49).field(), "");
}
TEST_F(TopK, IndicesBeyondTheUnit) {
  EXPECT_EQ(indices(3, 9, 20, 48, 50).field(), "indices");
  EXPECT_EQ(indices(3, 9, 20, 48, 65535).field(), "indices");
  EXPECT_EQ(indices(50, 51, 52, 53, 54).field(), "indices");
}
TEST_F(TopK, IndicesEqualOrDescending) {
  EXPECT_EQ(indices(3, 3, 20, 48, 49).field(), "indices");
  EXPECT_EQ(indices(3, 9, 8, 48, 49).field(), "indices");
  EXPECT_EQ(indices(3, 9, 20, 48, 0).field(), "indices");
}
TEST_F(TopK, IndicesPadding) { EXPECT_EQ(indices(3, 9, 20, 48, 49, 1).field(), "indices"); }
TEST_F(TopK, ValuesNotFinite) {
  for (uint64_t word = 0; word < 5; ++word)
    for (uint32_t value : kBadFloats)
      EXPECT_EQ(MessageBuilder(honest).set_word(word, value).field(), "values") << word << ' ' << value;
}
TEST_F(TopK, MarkerElsewhereThanFirst) {
  for (uint64_t word = 1; word < 5; ++word) EXPECT_EQ(MessageBuilder(honest).set_word(word, kMark).field(), "values");
}
TEST_F(TopK, MarkedUnitCarriesNothingElse) {
  MessageBuilder marked = indices(0, 1, 2, 3, 4);
  marked.set_word(0, kMark);
  for (uint64_t word = 1; word < 5; ++word) marked.set_word(word, 0);
  EXPECT_EQ(MessageBuilder(marked).field(), "");
  EXPECT_EQ(MessageBuilder(marked).set_word(3, 1).field(), "values");
  EXPECT_EQ(MessageBuilder(marked).set_word(3, kMinusZero).field(), "values");
  EXPECT_EQ(MessageBuilder(marked).set_word(7, 5).field(), "indices");
  EXPECT_EQ(MessageBuilder(marked).set_word(7, 4 | 1 << 16).field(), "indices");
}
TEST_F(TopK, ZerosAndSubnormalsAreValuesToo) {
  for (uint32_t value : {0u, kMinusZero, 1u, 0x7f7fffffu})
    EXPECT_EQ(MessageBuilder(honest).set_word(2, value).field(), "");
}
TEST_F(TopK, TheSecondTileIsCheckedAgainstItsOwnSize) {
  MessageBuilder message("topk:ratio=0.001", 32768 + 100);  // 33 of the first tile, 1 of the second
  const uint64_t second = 33 + 17;
  EXPECT_EQ(MessageBuilder(message).set_word(second + 1, 99).field(), "");
  EXPECT_EQ(MessageBuilder(message).set_word(second + 1, 100).field(), "indices");
  EXPECT_EQ(MessageBuilder(message).set_word(second, kInf).field(), "values");
}
TEST_F(TopK, WideIndices) {
  MessageBuilder message("topk:ratio=0.00005,mode=paper", 70000);  // 4 values, 4 indices of 32 bits
  ASSERT_EQ(message.bytes.size() - message.head_bytes(), 32u);
  EXPECT_EQ(MessageBuilder(message).set_word(7, 69999).field(), "");
  EXPECT_EQ(MessageBuilder(message).set_word(7, 70000).field(), "indices");
  EXPECT_EQ(MessageBuilder(message).set_word(7, message.word(6)).field(), "indices");
  EXPECT_EQ(MessageBuilder(message).set_word(7, message.word(7) | 1u << 31).field(), "indices");
}

// --- what the methods send ------------------------------------------------------------------------------------------

Codec with_levels(const std::vector<float>& levels, const char* spec = "optquant:bits=2") {
  std::vector<uint32_t> table;
  for (float level : levels) table.push_back(float_bits(level));
  return Codec::parse(spec).fitted(table);
}

TEST(Malformed, LevelsUnorderedOrNotFinite) {
  const Codec codec = with_levels({-1, -0.25f, 0.25f, 1});
  const auto altered = [&](uint32_t place, uint32_t bits) {
    return MessageBuilder(codec, 100).set(MessageBuilder(codec, 100).fitted_at() + 4 * place, bits).field();
  };
  EXPECT_EQ(altered(1, float_bits(-0.3f)), "");  // another honest table
  EXPECT_EQ(altered(1, float_bits(0.25f)), "spec_table");
  EXPECT_EQ(altered(1, float_bits(0.5f)), "spec_table");
  EXPECT_EQ(altered(0, float_bits(-1.5f)), "spec_table");
  EXPECT_EQ(altered(0, float_bits(-0.5f)), "spec_table") << "unbiased levels end at -1";
  for (uint32_t bad : kBadFloats)
    for (uint32_t place : {0u, 1u, 3u}) EXPECT_EQ(altered(place, bad), "spec_table");
  EXPECT_THROW(with_levels({-1, 1}), Error);
  EXPECT_THROW(with_levels({-1, -0.5f, 0, 0.5f, 1}), Error);
}

TEST(Malformed, ALevelThatIsNotThere) {
  // Three levels in two bits: code 3 means nothing.
  const Codec codec = with_levels({-1, 0, 1});
  EXPECT_EQ(MessageBuilder(codec, 16).set_word(0, 0xaaaaaaaau).field(), "");
  EXPECT_EQ(MessageBuilder(codec, 16).set_word(0, 0xeaaaaaaau).field(), "codes");
}

TEST(Malformed, TheOtherTables) {
  const auto refused = [](const char* spec, std::vector<uint32_t> table) {
    try {
      Codec::parse(spec).fitted(table);
      return std::string();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::usage);
      return error.field();
    }
  };
  const uint32_t minus = float_bits(-1.5f), plus = float_bits(1.5f);
  EXPECT_EQ(refused("casq:bits=2", {minus, 0, plus, 0, 3, 1, 2}), "");
  EXPECT_EQ(refused("casq:bits=2", {minus, 0, plus, 0, 3, 1, 1}), "table") << "a cluster without a turn";
  EXPECT_EQ(refused("casq:bits=2", {minus, 0, plus, 0, 3, 1, 4}), "table");
  EXPECT_EQ(refused("casq:bits=2", {plus, 0, minus, 0, 3, 1, 2}), "table");
  EXPECT_EQ(refused("casq:bits=2", {minus, plus, plus, 0, 3, 1, 2}), "table");
  EXPECT_EQ(refused("casq:bits=2", {minus, float_bits(0.5f), plus, 0, 3, 1, 2}), "table")
      << "the middle threshold is 0";
  EXPECT_EQ(refused("casq:bits=2", {kMinusInf, 0, plus, 0, 3, 1, 2}), "table");
  EXPECT_EQ(refused("casq:bits=2", {minus, 0, plus}), "table");
  EXPECT_EQ(refused("casq:bits=2,mode=paper", {minus, 0, plus, 30000, 1000, 1000, 30000}), "");
  EXPECT_EQ(refused("casq:bits=2,mode=paper", {minus, 0, plus, 60000, 1000, 1000, 30000}), "table")
      << "more than all buckets";
  EXPECT_EQ(refused("dqsgd", {16}), "");
  EXPECT_EQ(refused("dqsgd", {17}), "table");
  EXPECT_EQ(refused("dqsgd", {1}), "table");
  EXPECT_EQ(refused("dqsgd", {4, 4}), "table");
  EXPECT_EQ(refused("rangefloat:bits=8", {6}), "");
  EXPECT_EQ(refused("rangefloat:bits=8", {7}), "table") << "a mantissa wider than the format";
  EXPECT_EQ(refused("rangefloat:bits=8", {0}), "table");
  EXPECT_EQ(refused("rangefloat:bits=8,mantissa=3", {3}), "table") << "the spec says it";
  EXPECT_EQ(refused("fft", {8, 0, 0x3fe00000u}), "");
  EXPECT_EQ(refused("fft", {9, 0, 0x3fe00000u}), "table");
  EXPECT_EQ(refused("fft", {8, 0, 0x3ff00000u}), "table") << "theta 1 keeps nothing";
  EXPECT_EQ(refused("fft", {8, 0, 0x7ff80000u}), "table");
  EXPECT_EQ(refused("qsgd", {1}), "table");
}

TEST(Malformed, AMantissaWiderThanTheFormat) {
  std::string spec = Codec::parse("rangefloat:bits=8,mantissa=6").str();
  EXPECT_EQ(MessageBuilder(spec, 40).field(), "");
  spec.replace(spec.find("mantissa=6"), 10, "mantissa=7");
  EXPECT_EQ(MessageBuilder("rangefloat:bits=8,mantissa=6", 40).set_specs({spec}).field(), "spec");
}

TEST(Malformed, CodesOfTheGrids) {
  // loggrid:k=1 has five values in three bits, unigrid 2 * top + 1 in `bits`.
  EXPECT_EQ(MessageBuilder("loggrid:k=1", 10).set_word(0, 4).field(), "");
  for (uint32_t code : {5u, 6u, 7u}) EXPECT_EQ(MessageBuilder("loggrid:k=1", 10).set_word(0, code).field(), "codes");
  EXPECT_EQ(MessageBuilder("unigrid:bits=4", 8).set_word(0, 0xe).field(), "");
  EXPECT_EQ(MessageBuilder("unigrid:bits=4", 8).set_word(0, 0xf).field(), "codes");
  // A range float with a fixed range may leave codes unused.
  const char* fixed = "rangefloat:bits=8,mantissa=3,min=-2,max=2,eps=0.125";
  EXPECT_EQ(MessageBuilder(fixed, 4).set_word(0, 66).field(), "");
  EXPECT_EQ(MessageBuilder(fixed, 4).set_word(0, 67).field(), "codes");
  EXPECT_EQ(MessageBuilder(fixed, 4).set_word(1, float_bits(3.0f)).field(), "scales") << "the range is in the spec";
  EXPECT_EQ(MessageBuilder("unigrid:range=0.5", 4).set_word(1, float_bits(0.25f)).field(), "scales");
}

TEST(Malformed, BucketsOfCasq) {
  // 40 elements: 3 words of codes, the largest magnitude, 4 means in two words.
  MessageBuilder honest("casq:bits=2", 40);
  EXPECT_EQ(honest.field(), "");
  EXPECT_EQ(MessageBuilder("casq:bits=2", 40).set_word(3, kInf).field(), "scales");
  EXPECT_EQ(MessageBuilder("casq:bits=2", 40).set_word(3, kMinusZero).field(), "scales");
  for (uint32_t mean : {0x4000u, 0x7c00u, 0x7e00u, 0xffffu, 0xc000u})
    EXPECT_EQ(MessageBuilder("casq:bits=2", 40).set_word(4, mean).field(), "buckets") << mean;
  EXPECT_EQ(MessageBuilder("casq:bits=2", 40).set_word(3, kMark).field(), "buckets")
      << "a marked unit carries nothing else";
  EXPECT_EQ(MessageBuilder("casq:bits=2", 40).set_word(2, 0x10000u).field(), "padding");
  for (uint32_t bad : kBadFloats)
    EXPECT_EQ(MessageBuilder("casq:bits=2,mode=paper", 40).set_word(4, bad).field(), "buckets");
  EXPECT_EQ(MessageBuilder("casq:bits=1", 40).set_word(4, 0x00010000u).field(), "padding")
      << "three means: the last half word is unused";
}

TEST(Malformed, BitmapsOfFft) {
  // 64 values: a word of bitmap, 5 of 32 bins kept, 10 codes of 10 bits in 4 words, the scale.
  MessageBuilder honest("fft", 64);
  const uint32_t bitmap = honest.word(0);
  EXPECT_EQ(std::popcount(bitmap), 5);
  EXPECT_EQ(honest.field(), "");
  EXPECT_EQ(MessageBuilder("fft", 64).set_word(0, bitmap & (bitmap - 1)).field(), "bitmap");
  EXPECT_EQ(MessageBuilder("fft", 64).set_word(0, bitmap | ~bitmap).field(), "bitmap");
  EXPECT_EQ(MessageBuilder("fft", 64).set_word(0, std::rotl(bitmap, 1)).field(), "") << "other frequencies, as many";
  EXPECT_EQ(MessageBuilder("fft", 64).set_word(4, honest.word(4) | 0x80000000u).field(), "padding");
  EXPECT_EQ(MessageBuilder("fft", 64).set_word(5, kInf).field(), "scales");
  EXPECT_EQ(MessageBuilder("fft", 64).set_word(5, kMinusZero).field(), "scales");
  EXPECT_EQ(MessageBuilder("fft", 64).set_word(5, kMark).field(), "bitmap") << "a marked unit carries nothing else";
  MessageBuilder exact("fft:format=float", 64);
  EXPECT_EQ(exact.field(), "");
  for (uint32_t bad : kBadFloats) EXPECT_EQ(MessageBuilder("fft:format=float", 64).set_word(1, bad).field(), "codes");
  EXPECT_EQ(MessageBuilder("fft:format=float", 64).set_word(1, float_bits(1.5f)).field(), "codes")
      << "parts are relative to the largest";
}

}  // namespace
}  // namespace gradwire::test
