// SPDX-License-Identifier: Apache-2.0
// The small pure functions everything else stands on, and the pool.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "core/checksum.h"
#include "core/pool.h"
#include "core/random.h"
#include "device/params.h"

namespace gradwire {
namespace {

#if defined(__FLT16_MANT_DIG__)  // a compiler that has the type on this target
TEST(Half, WidensAndRoundsLikeTheCompilersOwnType) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float wide = f16_to_f32(static_cast<uint16_t>(h));
    _Float16 own;
    const uint16_t bits = static_cast<uint16_t>(h);
    std::memcpy(&own, &bits, 2);
    if (std::isnan(wide)) {
      ASSERT_TRUE(std::isnan(static_cast<float>(own))) << h;
      continue;
    }
    ASSERT_EQ(wide, static_cast<float>(own)) << h;
    ASSERT_EQ(f32_to_f16(wide), h) << h;
  }
  std::mt19937 generator(1);
  for (int i = 0; i < 200000; ++i) {
    const float x = bits_float(static_cast<uint32_t>(generator()));
    if (std::isnan(x)) continue;
    const _Float16 own = static_cast<_Float16>(x);
    uint16_t bits;
    std::memcpy(&bits, &own, 2);
    ASSERT_EQ(f32_to_f16(x), bits) << x;
  }
}
#endif

TEST(Bfloat, RoundsToNearestEven) {
  EXPECT_EQ(f32_to_bf16(1.0f), 0x3f80);
  EXPECT_EQ(f32_to_bf16(bits_float(0x3f808000)), 0x3f80);  // halfway, even below
  EXPECT_EQ(f32_to_bf16(bits_float(0x3f818000)), 0x3f82);  // halfway, even above
  EXPECT_EQ(f32_to_bf16(bits_float(0x3f808001)), 0x3f81);
  EXPECT_EQ(f32_to_bf16(bits_float(0x7f7fffff)), 0x7f80);  // beyond the largest
  EXPECT_EQ(f32_to_bf16(std::nanf("")), kMarkerBf16);
}

TEST(Checksum, AnyChangedWordChangesItAndOrderDoesNotMatter) {
  std::mt19937 generator(2);
  std::vector<uint32_t> words(1000);
  for (uint32_t& word : words) word = static_cast<uint32_t>(generator());
  const uint64_t sum = body_sum(words.data(), words.size());
  LaneSums lanes;
  for (size_t i = words.size(); i-- > 0;) lanes.add_word(words[i], i);
  EXPECT_EQ(lanes.total(), sum);
  for (size_t i = 0; i < words.size(); ++i)
    for (uint32_t flip : {1u, 0x80000000u, 0xffffffffu, 0x00010000u}) {
      words[i] ^= flip;
      ASSERT_NE(body_sum(words.data(), words.size()), sum) << i;
      words[i] ^= flip;
    }
  for (size_t i = 0; i + 33 < words.size(); ++i) {
    std::swap(words[i], words[i + 33]);
    ASSERT_NE(body_sum(words.data(), words.size()), sum) << "words " << i << " and " << i + 33 << " changed places";
    std::swap(words[i], words[i + 33]);
  }
  EXPECT_NE(seal(sum, 1000), seal(sum, 1001));
}

TEST(Random, KeysOfBlocksStagesAndStepsDiffer) {
  std::set<uint64_t> keys;
  for (uint64_t step = 0; step < 10; ++step)
    for (uint32_t stage = 0; stage < 10; ++stage)
      for (uint64_t block = 0; block < 10; ++block)
        keys.insert(block_key(tensor_key(call_key(1, step, stage, 3), 7), block));
  EXPECT_EQ(keys.size(), 1000u);
}

TEST(Random, BitsAreEvenlySpread) {
  // 2^20 draws into 256 bins, both halves: chi-squared with 255 degrees of freedom is 255 +- 22.6; six sigma.
  for (int half : {0, 16}) {
    std::vector<double> bins(256, 0);
    for (uint64_t block = 0; block < 2048; ++block)
      for (uint32_t c = 0; c < 512; ++c) ++bins[(random_word(block_key(3, block), c) >> half >> 8) & 0xff];
    double chi = 0;
    for (double count : bins) chi += (count - 4096) * (count - 4096) / 4096;
    EXPECT_LT(chi, 255 + 6 * 22.6);
    EXPECT_GT(chi, 255 - 6 * 22.6);
  }
}

TEST(Params, TheNormItselfNeverLandsBeyondTheTopLevel) {
  std::mt19937 generator(4);
  for (int i = 0; i < 200000; ++i) {
    const float norm = bits_float(static_cast<uint32_t>(generator()) & 0x7fffffffu);
    if (!(norm > 0) || !std::isfinite(norm)) continue;
    for (uint8_t bits = 2; bits <= 8; ++bits) {
      const Scheme scheme{.bits = bits};
      UnitParams p;
      scale_to_levels(norm, static_cast<float>(levels(scheme)), 65536.0f, p);
      ASSERT_LE(norm * p.pre * p.scale, static_cast<float>(levels(scheme)) * 65536.0f)
          << norm << " at " << int{bits} << " bits";
      ASSERT_TRUE(std::isfinite(p.a * static_cast<float>(levels(scheme)))) << norm;
    }
  }
}

TEST(Pool, RunsEveryTaskOnceAndPassesErrorsOn) {
  for (int threads : {1, 2, 5}) {
    Pool pool(threads);
    for (int round = 0; round < 50; ++round) {
      std::vector<std::atomic<int>> seen(100);
      pool.run(seen.size(), [&](size_t task, int worker) {
        ASSERT_LT(worker, threads);
        ++seen[task];
      });
      for (const auto& count : seen) ASSERT_EQ(count.load(), 1);
    }
    EXPECT_THROW(pool.run(100,
                          [](size_t task, int) {
                            if (task == 37) throw std::runtime_error("37");
                          }),
                 std::runtime_error);
    std::atomic<int> after{0};
    pool.run(10, [&](size_t, int) { ++after; });
    EXPECT_EQ(after.load(), 10) << "a pool goes on after an error";
  }
  EXPECT_ANY_THROW(Pool(0));
}

}  // namespace
}  // namespace gradwire
