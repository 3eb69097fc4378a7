// SPDX-License-Identifier: Apache-2.0
// Packed topk: places that are read back from any choice of elements, sizes, levels near the best that a search finds,
// texts that leave messages of before as they were, and malformed units.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "codec/test_devices.h"
#include "codec/topk/places.h"
#include "message/message_builder.h"

namespace gradwire::test {
namespace {

constexpr uint32_t kInf = 0x7f800000u, kMark = 0x7fc00000u;

std::vector<uint32_t> choice_of(uint64_t elements, uint64_t k, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint32_t> all(elements);
  std::iota(all.begin(), all.end(), 0u);
  if (seed % 3 == 0) std::shuffle(all.begin(), all.end(), random);
  if (seed % 3 == 1) std::reverse(all.begin(), all.end());  // the last ones; else the first
  all.resize(k);
  std::sort(all.begin(), all.end());
  return all;
}

std::vector<uint32_t> read(const PlaceWords& p, const std::vector<uint32_t>& words, bool& taken) {
  std::vector<uint32_t> found;
  taken = for_places(p, words.data(), [&](uint64_t j, uint32_t index) {
    EXPECT_EQ(j, found.size());
    found.push_back(index);
  });
  return found;
}

TEST(TopkPlaces, AnyChoiceIsReadBack) {
  for (const uint64_t elements : {1, 2, 31, 32, 33, 100, 1000, 4097, 32768})
    for (const uint64_t share : {1, 2, 3, 7, 64, 1000, 40000})
      for (const uint32_t kind : {kRawPlaces, kCodedPlaces, kBitmapPlaces})
        for (uint64_t seed = 0; seed < 3; ++seed) {
          const uint64_t k = std::max<uint64_t>(1, elements / share);
          Scheme scheme{.unit = 32768, .steps = kind};
          const PlaceWords p{kind, elements, k};
          std::vector<uint32_t> words(topk_place_words(scheme, elements, elements, k), 0xddddddddu);
          const std::vector<uint32_t> chosen = choice_of(elements, k, seed);
          write_places(p, chosen.data(), words.data());
          bool taken = false;
          ASSERT_EQ(read(p, words, taken), chosen) << elements << " " << k << " " << kind;
          ASSERT_TRUE(taken);
        }
}

// Whatever bits arrive, what is taken are k ascending indices, and writing them gives the same words: there is one way
// to write a choice.
TEST(TopkPlaces, OnlyWhatAnEncoderWritesIsTaken) {
  std::mt19937_64 random(5);
  int taken_count = 0;
  for (const uint32_t kind : {kRawPlaces, kCodedPlaces, kBitmapPlaces})
    for (int round = 0; round < 20000; ++round) {
      const uint64_t elements = 1 + random() % 90, k = 1 + random() % std::min<uint64_t>(elements, 12);
      const PlaceWords p{kind, elements, k};
      const Scheme scheme{.unit = 32768, .steps = kind};
      std::vector<uint32_t> words(topk_place_words(scheme, elements, elements, k));
      write_places(p, choice_of(elements, k, 0).data(), words.data());
      for (uint64_t flips = random() % 4; flips > 0; --flips) words[random() % words.size()] ^= 1u << random() % 32;
      bool taken = false;
      const std::vector<uint32_t> found = read(p, words, taken);
      for (size_t j = 0; j < found.size(); ++j) {
        ASSERT_LT(found[j], elements);
        if (j > 0) {
          ASSERT_GT(found[j], found[j - 1]);
        }
      }
      if (!taken) continue;
      ++taken_count;
      ASSERT_EQ(found.size(), k);
      std::vector<uint32_t> again(words.size());
      write_places(p, found.data(), again.data());
      ASSERT_EQ(again, words) << elements << " " << k << " " << kind;
    }
  EXPECT_GT(taken_count, 15000);
  EXPECT_LT(taken_count, 40000);
}

TEST(PackedTopk, TenBitsAValue) {
  const uint64_t count = 1 << 20;
  const auto bits_of = [&](const char* spec) {
    return static_cast<double>(Codec::parse(spec).bytes(count)) * 8 / static_cast<double>(count);
  };
  EXPECT_LE(bits_of("topk:ratio=0.015625,bits=2"), 0.16);
  EXPECT_EQ(bits_of("topk:ratio=0.015625"), 0.75);
  EXPECT_EQ(bits_of("topk:ratio=0.015625,bits=2,index=coded"), bits_of("topk:ratio=0.015625,bits=2"));
  EXPECT_NEAR(bits_of("topk:ratio=0.015625,bits=16,index=bitmap"), 1.25, 1e-9);
  // With elements / k = 2^l * f, f from 1 to 2, a place takes l + 1 + f bits. The logarithm of the number of choices is
  // l + log2(f) + log2(e) bits a place or, for large ratios, less; so the difference is 0.56 at most. Two strings of
  // whole words waste up to 31 bits each.
  for (const double ratio : {0.001, 0.003, 0.01, 0.03, 0.1}) {
    const double k = std::ceil(ratio * 32768), share = k / 32768;
    const double least = -std::log2(share) - (1 - share) / share * std::log2(1 - share);
    const double used = bits_of(("topk:index=coded,ratio=" + std::to_string(ratio)).c_str()) / share - 32;
    EXPECT_GE(used, least) << ratio;
    EXPECT_LE(used, least + 0.57 + 62 / k) << ratio;
  }
}

TEST(PackedTopk, TextsOfBeforeAndNow) {
  EXPECT_EQ(Codec::parse("topk:ratio=0.03").str(), "topk:ratio=0.03,mode=tile");
  EXPECT_EQ(Codec::parse("topk:ratio=0.03,bits=32,index=raw"), Codec::parse("topk:ratio=0.03"));
  EXPECT_EQ(Codec::parse("topk:ratio=0.03,bits=2").str(), "topk:ratio=0.03,mode=tile,bits=2,index=coded");
  EXPECT_EQ(Codec::parse("topk:ratio=0.03,bits=2,index=raw").str(), "topk:ratio=0.03,mode=tile,bits=2,index=raw");
  EXPECT_EQ(Codec::parse("topk:index=coded").wire_spec(), "topk:ratio=0.01,mode=tile,bits=32,index=coded");
  EXPECT_EQ(Codec::parse("topk:ratio=0.03,bits=2").get("index"), "coded");
  const auto field = [](const char* spec) -> std::string {
    try {
      Codec::parse(spec);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::usage);
      return e.field();
    }
    return "";
  };
  for (const char* spec : {"topk:bits=0", "topk:bits=9", "topk:bits=24", "topk:mode=paper,bits=2"})
    EXPECT_EQ(field(spec), "bits") << spec;
  for (const char* spec : {"topk:index=none", "topk:mode=paper,index=coded", "topk:mode=paper,index=bitmap"})
    EXPECT_EQ(field(spec), "index") << spec;
  // A message names both parameters or neither.
  for (const char* text : {"topk:ratio=0.1,mode=tile,bits=32,index=raw", "topk:ratio=0.1,mode=tile,bits=2",
                           "topk:ratio=0.1,mode=tile,index=coded", "topk:ratio=0.1,mode=paper,bits=2,index=coded",
                           "topk:ratio=0.1,mode=tile,index=coded,bits=2", "topk:ratio=0.1,mode=tile,bits=9,index=raw"})
    EXPECT_EQ(MessageBuilder("topk:ratio=0.1,bits=2", 50).set_specs({text}).field(), "spec") << text;
  EXPECT_EQ(
      MessageBuilder("topk:ratio=0.1,bits=2", 50).set_specs({"topk:ratio=0.1,mode=tile,bits=2,index=coded"}).field(),
      "");
}

// The squared error of the kept values, and of the best n levels that a long search finds for them.
struct LevelErrors {
  double found = 0, best = 0;
};
LevelErrors level_errors(const std::vector<float>& x, int bits) {
  const Plan plan({{"w", x.size(), DType::f32, Codec::parse("topk:ratio=0.03,bits=" + std::to_string(bits))}});
  const TestDevice device(Device{});
  const std::vector<float> y = values_of(device.decode(plan, device.encode(plan, {raw_of(x)}, {}))[0]);
  LevelErrors e;
  std::vector<double> kept;
  for (size_t i = 0; i < x.size(); ++i)
    if (y[i] != 0) {
      kept.push_back(std::fabs(static_cast<double>(x[i])));
      e.found += std::pow(static_cast<double>(x[i]) - y[i], 2);
    }
  std::sort(kept.begin(), kept.end());
  // Dynamic programming over where levels end: exact.
  const size_t n = kept.size(), levels = size_t{1} << (bits - 1);
  std::vector<double> sum(n + 1), squares(n + 1), cost(n + 1, HUGE_VAL), next(n + 1);
  for (size_t i = 0; i < n; ++i) sum[i + 1] = sum[i] + kept[i], squares[i + 1] = squares[i] + kept[i] * kept[i];
  cost[0] = 0;
  for (size_t level = 0; level < levels; ++level) {
    for (size_t to = 0; to <= n; ++to) {
      next[to] = cost[to];
      for (size_t from = 0; from < to; ++from) {
        const double s = sum[to] - sum[from], count = static_cast<double>(to - from);
        next[to] = std::min(next[to], cost[from] + squares[to] - squares[from] - s * s / count);
      }
    }
    std::swap(cost, next);
  }
  e.best = cost[n];
  return e;
}

TEST(PackedTopk, LevelsAreCloseToTheBest) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> x(16384);  // normal; of heavier tails; Laplace
    for (float& v : x) {
      v = normal(random) * 0.01f;
      if (seed % 3 == 1) v *= std::exp(normal(random));
      if (seed % 3 == 2) v *= std::sqrt(std::pow(normal(random), 2.0f) + std::pow(normal(random), 2.0f));
    }
    // One bit: a mean, which is the best. Two bits: k-means from a fixed start. More: levels on a parabola.
    const double bound[] = {1.0001, 1.1, 1.6};
    for (int bits = 1; bits <= 3; ++bits) {
      const LevelErrors e = level_errors(x, bits);
      EXPECT_LE(e.found, bound[bits - 1] * e.best) << bits << " bits, seed " << seed;
      EXPECT_GE(e.found, 0.9999 * e.best) << bits << " bits, seed " << seed;
    }
  }
}

// --- malformed units, with right checksums ------------------------------------------------------------------------

// 5 of 50 elements are kept. Words 0 and 1 are scales, 2 the codes, 10 bits of it; 3 has the lower 3 bits of the five
// indices and 4 the string of 5 + (49 >> 3) = 11 bits.
struct PackedUnits : testing::Test {
  const MessageBuilder honest{"topk:ratio=0.1,bits=2", 50};
  MessageBuilder with(uint64_t word, uint32_t value) const { return MessageBuilder(honest).set_word(word, value); }
  MessageBuilder places(std::vector<uint32_t> indices) const {
    uint32_t words[2];
    write_places({kCodedPlaces, 50, 5}, indices.data(), words);
    return MessageBuilder(honest).set_word(3, words[0]).set_word(4, words[1]);
  }
};

TEST_F(PackedUnits, AnyAscendingPlacesAreTaken) {
  ASSERT_EQ(honest.bytes.size() - honest.head_bytes(), 20u);
  EXPECT_EQ(places({0, 1, 2, 3, 4}).field(), "");
  EXPECT_EQ(places({3, 9, 20, 48, 49}).field(), "");
}
TEST_F(PackedUnits, TooFewOrTooManyPlaces) {
  const uint32_t high = honest.word(4);
  for (uint32_t bit = 0; bit < 11; ++bit) EXPECT_EQ(with(4, high ^ 1u << bit).field(), "indices") << bit;
  EXPECT_EQ(with(4, 0).field(), "indices");
  EXPECT_EQ(with(4, 0x7ff).field(), "indices");
}
TEST_F(PackedUnits, PlacesThatDoNotAscend) {
  EXPECT_EQ(MessageBuilder(places({0, 1, 2, 3, 4})).set_word(3, 0).field(), "indices") << "all equal";
  const uint32_t low = places({0, 1, 2, 3, 4}).word(3);
  EXPECT_EQ(MessageBuilder(places({0, 1, 2, 3, 4})).set_word(3, low ^ 3).field(), "indices") << "3 before 1";
}
TEST_F(PackedUnits, PlacesBeyondTheUnit) {
  MessageBuilder last = places({3, 9, 20, 48, 49});
  EXPECT_EQ(last.set_word(3, last.word(3) | 7u << 12).field(), "indices") << "55 of 50";
}
TEST_F(PackedUnits, UnusedBitsOfPlaces) {
  for (const uint32_t bit : {15u, 31u}) EXPECT_EQ(with(3, honest.word(3) | 1u << bit).field(), "indices");
  const MessageBuilder lower = places({0, 1, 2, 3, 4});  // bits 0 to 4; one of them moves beyond the string
  for (const uint32_t bit : {11u, 31u})
    EXPECT_EQ(MessageBuilder(lower).set_word(4, (lower.word(4) & ~16u) | 1u << bit).field(), "indices");
}
TEST_F(PackedUnits, ScalesNotFiniteOrNegative) {
  for (const uint64_t word : {0, 1})
    for (const uint32_t scale : {kInf, 0xff800000u, 0x7fc00001u, 0xffc00000u, 0x80000000u, 0xbf800000u, 0xffffffffu})
      EXPECT_EQ(with(word, scale).field(), "scales") << word << " " << scale;
  EXPECT_EQ(with(1, kMark).field(), "scales") << "the marker is the first";
  for (const uint64_t word : {0, 1})
    for (const uint32_t scale : {0u, 1u, 0x7f7fffffu}) EXPECT_EQ(with(word, scale).field(), "");
}
TEST_F(PackedUnits, LevelsBeyondTheFloatsBecomeTheLargest) {
  MessageBuilder message = with(0, 0x7f7fffffu).set_word(1, 0x7f7fffffu);
  ASSERT_EQ(message.field(), "");
  const Plan plan(read_head(message.bytes, {}).tensors);
  std::vector<float> out(50);
  void* outputs[] = {out.data()};
  make_runner(plan, Device{})->decode(message.bytes, outputs);
  for (const float v : out) EXPECT_TRUE(v == 0 || std::fabs(v) == bits_float(0x7f7fffffu));
}
TEST_F(PackedUnits, UnusedBitsOfValues) {
  for (const uint32_t bit : {10u, 31u}) EXPECT_EQ(with(2, honest.word(2) | 1u << bit).field(), "padding");
}
TEST_F(PackedUnits, MarkedUnitCarriesNothingElse) {
  MessageBuilder marked = places({0, 1, 2, 3, 4});
  marked.set_word(0, kMark).set_word(1, 0).set_word(2, 0);
  EXPECT_EQ(MessageBuilder(marked).field(), "");
  EXPECT_EQ(MessageBuilder(marked).set_word(1, 1).field(), "scales");
  EXPECT_EQ(MessageBuilder(marked).set_word(2, 1).field(), "values");
  EXPECT_EQ(MessageBuilder(marked).set_word(4, honest.word(4)).field(), "indices");
}

TEST(PackedForms, HalvesBitmapsAndExactValues) {
  // 5 of 50: three words of bf16, then three of raw indices.
  const MessageBuilder halves("topk:ratio=0.1,bits=16,index=raw", 50);
  ASSERT_EQ(halves.bytes.size() - halves.head_bytes(), 24u);
  for (const uint32_t half : {0x7f80u, 0xff80u, 0x7fc1u, 0xffffu}) {
    EXPECT_EQ(MessageBuilder(halves).set_word(1, half << 16).field(), "values") << half;
    EXPECT_EQ(MessageBuilder(halves).set_word(0, half).field(), "values") << half;
  }
  EXPECT_EQ(MessageBuilder(halves).set_word(0, 0x7fc0u).field(), "values") << "a marked unit has zeros";
  EXPECT_EQ(MessageBuilder(halves).set_word(1, 0x7fc0u).field(), "values") << "the marker is the first";
  EXPECT_EQ(MessageBuilder(halves).set_word(2, halves.word(2) | 1u << 16).field(), "padding");
  EXPECT_EQ(MessageBuilder(halves).set_word(5, 50).field(), "indices");
  // Five words of f32, two of a bitmap.
  const MessageBuilder bitmap("topk:ratio=0.1,index=bitmap", 50);
  ASSERT_EQ(bitmap.bytes.size() - bitmap.head_bytes(), 28u);
  EXPECT_EQ(MessageBuilder(bitmap).set_word(5, 31).set_word(6, 0).field(), "");
  EXPECT_EQ(MessageBuilder(bitmap).set_word(5, 15).set_word(6, 0).field(), "indices") << "four bits";
  EXPECT_EQ(MessageBuilder(bitmap).set_word(5, 63).set_word(6, 0).field(), "indices") << "six bits";
  EXPECT_EQ(MessageBuilder(bitmap).set_word(5, 15).set_word(6, 1u << 18).field(), "indices") << "element 50";
  EXPECT_EQ(MessageBuilder(bitmap).set_word(3, kInf).field(), "values");
  EXPECT_EQ(MessageBuilder(bitmap).set_word(0, kMark).field(), "values");
  // One bit a value has one scale.
  const MessageBuilder signs("topk:ratio=0.1,bits=1", 50);
  ASSERT_EQ(signs.bytes.size() - signs.head_bytes(), 16u);
  EXPECT_EQ(MessageBuilder(signs).set_word(0, 0xbf800000u).field(), "scales");
  EXPECT_EQ(MessageBuilder(signs).set_word(1, 32).field(), "padding");
}

TEST(PackedForms, TheSecondTileIsCheckedAgainstItsOwnSize) {
  const MessageBuilder message("topk:ratio=0.001,bits=2", 32768 + 100);  // 33 of the first tile, 1 of the second
  const uint64_t words = (message.bytes.size() - message.head_bytes()) / 4, second = words - 5;
  // Scales, a code, 6 bits of one index, a string of 1 + (99 >> 6) = 2 bits.
  EXPECT_EQ(MessageBuilder(message).set_word(second + 3, 35).set_word(second + 4, 2).field(), "");
  EXPECT_EQ(MessageBuilder(message).set_word(second + 3, 36).set_word(second + 4, 2).field(), "indices");
  EXPECT_EQ(MessageBuilder(message).set_word(second, kInf).field(), "scales");
}

}  // namespace
}  // namespace gradwire::test
