// SPDX-License-Identifier: Apache-2.0
// The transform, its short floats and the units of the codec `fft`, below plans and messages. The transform is held
// against the sum that defines it, in double, and against KissFFT where that is installed; vectors against the
// reference loop, bit for bit; what is kept against a sort; errors and sizes against the published figures.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "codec/fft/cpu.h"
#include "device/lane.h"

#if __has_include(<kissfft/kiss_fftr.h>) && defined(GRADWIRE_TEST_KISSFFT)
#include <kissfft/kiss_fftr.h>
#define HAS_KISSFFT 1
#endif

namespace gradwire {
namespace {

#define GW_BODY inline
#define GW_QUOTIENT(a, b) ((a) / (b))
#include "codec/fft/transform-inl.h"
#include "codec/rangefloat/range_float-inl.h"
#undef GW_BODY

constexpr double kPi = 3.14159265358979323846;

std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> all{&scalar_kernels()};
  for (const Kernels* kernels : vector_kernels()) all.push_back(kernels);
  return all;
}

std::vector<float> white(size_t n, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& v : x) v = normal(engine);
  return x;
}

std::vector<float> correlated(size_t n, double rho, uint32_t seed) {
  std::vector<float> x = white(n, seed);
  double before = x[0] / std::sqrt(1 - rho * rho);
  for (float& v : x) v = static_cast<float>(before = rho * before + v);
  return x;
}

// Bins as the codec has them: bin 0 is (constant, alternating).
std::vector<std::complex<double>> naive(const std::vector<float>& x) {
  const size_t n = x.size();
  std::vector<std::complex<double>> turns(n), bins(n / 2);
  for (size_t i = 0; i < n; ++i) turns[i] = std::polar(1.0, -2 * kPi * static_cast<double>(i) / static_cast<double>(n));
  double even = 0, odd = 0;
  for (size_t i = 0; i < n; ++i) (i % 2 ? odd : even) += x[i];
  bins[0] = {even + odd, even - odd};
  for (size_t k = 1; k < n / 2; ++k)
    for (size_t i = 0; i < n; ++i) bins[k] += static_cast<double>(x[i]) * turns[i * k % n];
  return bins;
}

struct Bench {  // one thread's memory
  std::unique_ptr<Scratch> scratch = std::make_unique<Scratch>();
  FftWork work{*scratch};
};

// A tensor through the codec.
struct Coded {
  std::vector<uint32_t> words;
  std::vector<float> decoded;
  LaneSums check;
};
Span span_of(const std::vector<float>& x, std::vector<uint32_t>& words) {
  Span s;
  s.count = x.size();
  s.in = x.data();
  s.region = words.data();
  s.region_index = 5;
  return s;
}
Coded code(const Kernels& kernels, const FftScheme& scheme, const std::vector<float>& x) {
  Bench b;
  Coded c;
  c.words.assign(fft_region_words(scheme, x.size()), 0xdeadbeefu);
  c.decoded.assign(x.size(), -1.0f);
  Span s = span_of(x, c.words);
  s.out = c.decoded.data();
  const uint64_t groups = fft_groups(scheme, x.size());
  encode_fft(kernels, fft_kernels(kernels), scheme, s, 0, groups, *b.scratch, c.check);
  for (uint64_t g = 0; g < groups; ++g) EXPECT_EQ(check_fft(scheme, s, g), nullptr) << "group " << g;
  decode_fft(kernels, fft_kernels(kernels), scheme, s, 0, groups, *b.scratch);
  return c;
}

double relative_error(const std::vector<float>& x, const std::vector<float>& y) {
  double error = 0, energy = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    error += std::pow(double{x[i]} - double{y[i]}, 2);
    energy += std::pow(double{x[i]}, 2);
  }
  return error / energy;
}

uint32_t bits(float x) { return float_bits(x); }
uint32_t range_encode(const RangeFloat& f, float x) { return RangeLanes<ScalarLane>::encode(x, f); }
float range_decode(const RangeFloat& f, uint32_t code) { return RangeLanes<ScalarLane>::decode(code, f); }

TEST(FftTransform, IsTheDiscreteFourierTransformToAFloatsPrecision) {
  Bench b;
  for (uint32_t size = 64; size <= 4096; size *= 2) {
    const std::vector<float> x = white(size, size);
    const auto expected = naive(x);
    for (const Kernels* kernels : all_kernels()) {
      fft_kernels(*kernels).forward(x.data(), size, 1.0f, 1.0f, b.work);
      double error = 0, energy = 0;
      for (uint32_t j = 0; j < size / 2; ++j) {
        error += std::norm(std::complex<double>(b.work.re[j], b.work.im[j]) / 2.0 - expected[j]);
        energy += std::norm(expected[j]);
      }
      EXPECT_LT(std::sqrt(error / energy), 1e-6) << size << ' ' << kernels->name;
    }
  }
}

#if defined(HAS_KISSFFT)
TEST(FftTransform, AgreesWithKissFft) {
  Bench b;
  for (uint32_t size = 64; size <= 4096; size *= 2) {
    const std::vector<float> x = white(size, size + 1);
    std::vector<kiss_fft_cpx> expected(size / 2 + 1);
    kiss_fftr_cfg plan = kiss_fftr_alloc(static_cast<int>(size), 0, nullptr, nullptr);
    kiss_fftr(plan, x.data(), expected.data());
    kiss_fftr_free(plan);
    expected[0].i = expected[size / 2].r;
    fft_kernels(kernels_named("")).forward(x.data(), size, 1.0f, 1.0f, b.work);
    double error = 0, energy = 0;
    for (uint32_t j = 0; j < size / 2; ++j) {
      error += std::pow(b.work.re[j] / 2 - expected[j].r, 2) + std::pow(b.work.im[j] / 2 - expected[j].i, 2);
      energy += std::pow(expected[j].r, 2) + std::pow(expected[j].i, 2);
    }
    EXPECT_LT(std::sqrt(error / energy), 1e-6) << size;
  }
}
#endif

TEST(FftTransform, InverseUndoesForward) {
  Bench b;
  for (uint32_t size = 64; size <= 4096; size *= 2) {
    const std::vector<float> x = correlated(size, 0.9, size);
    std::vector<float> y(size);
    for (const Kernels* kernels : all_kernels()) {
      fft_kernels(*kernels).forward(x.data(), size, 1.0f, 1.0f, b.work);
      fft_kernels(*kernels).inverse(size, 0.5f / static_cast<float>(size), y.data(), b.work);
      EXPECT_LT(std::sqrt(relative_error(x, y)), 1e-6) << size << ' ' << kernels->name;
    }
  }
}

TEST(FftTransform, OfOneWaveIsOneBin) {
  Bench b;
  for (const uint32_t size : {64u, 1024u, 4096u})
    for (const uint32_t bin : {0u, 1u, size / 4, size / 2 - 1}) {
      std::vector<float> x(size);
      for (uint32_t i = 0; i < size; ++i)
        x[i] = static_cast<float>(std::cos(2 * kPi * ((uint64_t{bin} * i) % size) / size));
      for (const Kernels* kernels : all_kernels()) {
        fft_kernels(*kernels).forward(x.data(), size, 1.0f, 1.0f, b.work);
        for (uint32_t j = 0; j < size / 2; ++j) {
          EXPECT_NEAR(b.work.re[j], j == bin ? (bin ? size : 2 * size) : 0, 2e-6 * size)
              << size << ' ' << bin << ' ' << j;
          EXPECT_NEAR(b.work.im[j], 0, 2e-6 * size) << size << ' ' << bin << ' ' << j;
        }
      }
    }
}

TEST(FftUnits, AreTheSameBytesOnEveryTarget) {
  const std::vector<uint64_t> counts = {1,    2,    63,   64,   65,   200,  256,  257,  1000,
                                        1024, 1025, 1300, 4095, 4096, 4097, 9000, 20000};
  for (const uint32_t chunk : {256u, 512u, 1024u, 2048u, 4096u})
    for (const uint64_t count : counts)
      for (const int kind : {0, 1, 2, 3}) {
        FftScheme scheme;
        scheme.chunk = chunk;
        scheme.keep = kind == 0 ? 0.15 : kind == 1 ? 0.6 : kind == 2 ? 1.0 : 0.01;
        scheme.bits = kind == 0 ? 10 : kind == 1 ? 7 : kind == 2 ? 32 : 16;
        scheme.mantissa = kind == 0 ? 5 : kind == 1 ? 3 : 10;
        scheme.truncate = kind == 1;
        std::vector<float> x = correlated(count, 0.7, static_cast<uint32_t>(count + chunk));
        if (kind == 1)
          for (float& v : x) v *= 0x1p-140f;
        if (kind == 3)
          for (float& v : x) v *= 0x1p125f;
        const Coded expected = code(scalar_kernels(), scheme, x);
        EXPECT_EQ(expected.check.total(), body_sum(expected.words.data(), expected.words.size(), 5));
        for (const Kernels* kernels : vector_kernels()) {
          const Coded found = code(*kernels, scheme, x);
          ASSERT_EQ(found.words, expected.words) << kernels->name << ' ' << chunk << ' ' << count << ' ' << kind;
          ASSERT_EQ(0, std::memcmp(found.decoded.data(), expected.decoded.data(), count * sizeof(float)))
              << kernels->name;
          ASSERT_EQ(found.check.total(), expected.check.total());
        }
      }
}

TEST(FftUnits, KeepExactlyTheStrongestBinsAndTheLowerOfEquals) {
  Bench b;
  for (const Kernels* kernels : all_kernels())
    for (const uint32_t size : {256u, 1024u, 4096u})
      for (const double keep : {0.001, 0.15, 0.5, 0.9, 1.0})
        for (const int kind : {0, 1, 2, 3}) {
          std::vector<float> x = white(size, size + static_cast<uint32_t>(kind));
          if (kind == 1) std::fill(x.begin(), x.end(), 0.0f);      // all weights alike
          if (kind == 2) std::fill(x.begin() + 1, x.end(), 0.0f);  // an impulse: all bins alike but for rounding
          if (kind == 3) x = correlated(size, 0.99, size);
          FftScheme scheme;
          scheme.chunk = size;
          scheme.keep = keep;
          const uint32_t bins = size / 2, kept = fft_kept(scheme, bins);
          uint32_t top = 0;
          for (float v : x) top = std::max(top, bits(v) & 0x7fffffffu);
          const Grid grid = grid_for(top);
          fft_kernels(*kernels).forward(x.data(), size, grid.pre, grid.grid, b.work);
          std::vector<uint32_t> weight(bins), order(bins);
          for (uint32_t j = 0; j < bins; ++j)
            weight[j] = bits((b.work.re[j] * b.work.re[j] + b.work.im[j] * b.work.im[j]) * (j ? 1.0f : 0.5f));
          std::iota(order.begin(), order.end(), 0u);
          std::stable_sort(order.begin(), order.end(), [&](uint32_t p, uint32_t q) { return weight[p] > weight[q]; });
          std::vector<uint32_t> expected(bins / 32, 0);
          for (uint32_t j = 0; j < kept; ++j) expected[order[j] / 32] |= 1u << (order[j] % 32);
          for (const uint32_t first : {0u, 1u << 23, 40u << 23, 0x7fffffffu}) {  // wherever the search begins
            uint32_t memory = first;
            std::vector<uint32_t> words(fft_size_words(scheme, size));
            fft_kernels(*kernels).encode(scheme, range_float_of(scheme), x.data(), size, words.data(), nullptr, 1,
                                         memory, b.work);
            words.resize(bins / 32);
            ASSERT_EQ(words, expected) << kernels->name << ' ' << size << ' ' << keep << ' ' << kind;
          }
        }
}

TEST(FftUnits, LeaveInTheResidualWhatTheReceiverLacks) {
  for (const Kernels* kernels : all_kernels())
    for (const uint32_t chunk : {256u, 1024u, 4096u})
      for (const DType residual : {DType::f32, DType::bf16}) {
        const std::vector<float> x = correlated(9001, 0.9, 3);
        std::vector<float> before = white(x.size(), 4), after(x.size(), 0.0f), sum(x.size());
        std::vector<uint16_t> before16(x.size()), after16(x.size());
        for (size_t i = 0; i < x.size(); ++i) before16[i] = f32_to_bf16(before[i]);
        for (size_t i = 0; i < x.size(); ++i)
          sum[i] = x[i] + (residual == DType::f32 ? before[i] : bf16_to_f32(before16[i])) * 4.0f;
        FftScheme scheme;
        scheme.chunk = chunk;
        scheme.keep = 0.2;
        const Coded expected = code(*kernels, scheme, sum);
        std::vector<uint32_t> words(expected.words.size());
        Bench b;
        LaneSums check;
        Span s = span_of(x, words);
        s.loss_scale = 4.0f;
        s.unscale = 0.25f;
        s.residual = residual;
        s.before = residual == DType::f32 ? static_cast<void*>(before.data()) : before16.data();
        s.after = residual == DType::f32 ? static_cast<void*>(after.data()) : after16.data();
        encode_fft(*kernels, fft_kernels(*kernels), scheme, s, 0, fft_groups(scheme, x.size()), *b.scratch, check);
        ASSERT_EQ(words, expected.words);
        for (size_t i = 0; i < x.size(); ++i) {
          const float left = (sum[i] - expected.decoded[i]) * 0.25f;
          if (residual == DType::f32)
            ASSERT_EQ(bits(after[i]), bits(left)) << i;
          else
            ASSERT_EQ(after16[i], f32_to_bf16(left)) << i;
        }
      }
}

TEST(FftUnits, AreMarkedWhereAValueIsNotFinite) {
  for (const Kernels* kernels : all_kernels())
    for (const float lie : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::quiet_NaN()}) {
      std::vector<float> x = white(5000, 8);
      x[1500] = lie;
      FftScheme scheme;
      scheme.keep = 0.3;
      const Coded c = code(*kernels, scheme, x);
      const uint64_t unit = fft_unit_words(scheme, 1024);
      for (uint64_t w = unit; w < 2 * unit; ++w) EXPECT_EQ(c.words[w], w == 2 * unit - 1 ? kMarker : 0u);
      for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(std::isnan(c.decoded[i]), i / 1024 == 1) << i;

      std::vector<float> before(x.size(), 0.5f), after(x.size(), 0.0f);
      std::vector<uint32_t> words(c.words.size());
      Bench b;
      LaneSums check;
      Span s = span_of(x, words);
      s.before = before.data();
      s.after = after.data();
      encode_fft(*kernels, fft_kernels(*kernels), scheme, s, 0, fft_groups(scheme, x.size()), *b.scratch, check);
      for (size_t i = 1024; i < 2048; ++i) EXPECT_EQ(after[i], 0.5f) << i;
    }
}

TEST(FftUnits, HoldValuesOfAnySize) {
  FftScheme scheme;
  scheme.keep = 1;
  scheme.bits = 16;
  scheme.mantissa = 11;
  for (const float size : {0x1p-130f, 0x1p-100f, 1.0f, 0x1p100f, 0x1p125f}) {
    std::vector<float> x = white(3000, 11);
    for (float& v : x) v = std::clamp(v, -3.9f, 3.9f) * size;
    EXPECT_LT(relative_error(x, code(kernels_named(""), scheme, x).decoded), 1e-6) << size;
  }
  std::vector<float> x(2048, std::numeric_limits<float>::max());  // what overflows on the way back is the largest float
  for (size_t i = 0; i < x.size(); i += 3) x[i] = -x[i];
  for (float v : code(kernels_named(""), scheme, x).decoded) EXPECT_TRUE(std::isfinite(v));
  const std::vector<float> zeros(1024, 0.0f);
  for (float v : code(kernels_named(""), scheme, zeros).decoded) EXPECT_EQ(bits(v), 0u);
}

TEST(FftUnits, LoseWhatThePublishedFiguresSay) {
  FftScheme scheme;
  scheme.chunk = 4096;
  scheme.keep = 1 - 0.85;
  const auto error = [&](const std::vector<float>& x) {
    return relative_error(x, code(kernels_named(""), scheme, x).decoded);
  };
  scheme.bits = 32;
  const double only_kept = error(white(65536, 21));
  EXPECT_NEAR(1 - only_kept, 0.435, 0.005);  // energy in 15 % of the bins of white noise
  EXPECT_NEAR(only_kept, 0.566, 0.006);
  scheme.bits = 10;
  EXPECT_NEAR(error(white(65536, 22)), 0.566, 0.006);
  EXPECT_NEAR(error(correlated(65536, 0.9, 23)), 0.107, 0.0107);
  double sum = 0;
  for (uint32_t seed = 24; seed < 28; ++seed) sum += error(correlated(65536, 0.99, seed));
  EXPECT_NEAR(sum / 4, 0.010, 0.0012);
}

TEST(FftUnits, TakeTheHonestSize) {
  FftScheme scheme;
  scheme.keep = 1 - 0.85;
  scheme.bits = 10;
  scheme.chunk = 4096;
  EXPECT_EQ(fft_kept(scheme, 2048), 307u);
  EXPECT_EQ(fft_unit_words(scheme, 4096), 64u + 192u + 1u);
  EXPECT_NEAR(fft_region_words(scheme, 1 << 20) * 32.0 / (1 << 20), 2.0, 0.01);
  scheme.chunk = 1024;
  EXPECT_EQ(fft_unit_words(scheme, 1024), 16u + 49u + 1u);
  EXPECT_NEAR(fft_region_words(scheme, 1 << 20) * 32.0 / (1 << 20), 2.0, 0.07);
  EXPECT_EQ(fft_unit_words(scheme, 1), fft_unit_words(scheme, 64));
  EXPECT_EQ(fft_region_words(scheme, 0), 0u);
}

TEST(FftUnits, RefuseLiesByName) {
  FftScheme scheme;
  scheme.chunk = 256;
  scheme.keep = 0.15;
  scheme.bits = 10;
  const std::vector<float> x = white(256, 31);
  const Coded honest = code(scalar_kernels(), scheme, x);
  const auto verdict = [&](const FftScheme& s, const std::vector<uint32_t>& from, size_t word, uint32_t value) {
    std::vector<uint32_t> words = from;
    words[word] = value;
    const char* field = check_fft(s, span_of(x, words), 0);
    return std::string(field ? field : "honest");
  };
  const size_t side = honest.words.size() - 1;
  EXPECT_EQ(verdict(scheme, honest.words, 0, honest.words[0] ^ 1u), "bitmap");
  EXPECT_EQ(verdict(scheme, honest.words, 3, honest.words[3] ^ 0x80000000u), "bitmap");
  ASSERT_EQ(2 * fft_kept(scheme, 128) * 10 % 32, 28u);
  EXPECT_EQ(verdict(scheme, honest.words, side - 1, honest.words[side - 1] | 0x10000000u), "padding");
  for (const uint32_t lie : {0x80000000u, bits(-1.0f), kInfBits, 0x7fc00001u, 0xffffffffu})
    EXPECT_EQ(verdict(scheme, honest.words, side, lie), "scales");
  EXPECT_EQ(verdict(scheme, honest.words, side, kMarker), "bitmap");  // a marked unit is empty
  std::vector<uint32_t> marked(honest.words.size(), 0);
  marked[side] = kMarker;
  EXPECT_EQ(verdict(scheme, marked, 0, 0), "honest");
  EXPECT_EQ(verdict(scheme, marked, 5, 1), "codes");

  scheme.bits = 32;
  const Coded plain = code(scalar_kernels(), scheme, x);
  for (const uint32_t lie : {bits(1.0f) + 1, bits(-1.0f) + 1, kInfBits, kMarker})
    EXPECT_EQ(verdict(scheme, plain.words, 6, lie), "codes");
  EXPECT_EQ(verdict(scheme, plain.words, 6, bits(-1.0f)), "honest");

  scheme.bits = 16;  // with 3 bits of mantissa there are fewer floats than codes
  scheme.mantissa = 3;
  const Coded wide = code(scalar_kernels(), scheme, x);
  const RangeFloat range = range_float_of(scheme);
  ASSERT_LT(range.most(), 0xffffu);
  EXPECT_EQ(verdict(scheme, wide.words, 4, range.most() << 16), "honest");
  EXPECT_EQ(verdict(scheme, wide.words, 4, (range.most() + 1) << 16), "codes");
}

TEST(RangeFloats, AreThePublishedExample) {
  const RangeFloat f = range_float_between(8, 3, 0.125f, 2.0f, true);
  EXPECT_EQ(f.base, 0b001111100000u);
  EXPECT_EQ(f.positive, 33u);
  EXPECT_EQ(range_encode(f, 0.256f), 9u);
  EXPECT_EQ(range_decode(f, 9), 0.25f);
  EXPECT_EQ(range_encode(f, 0.1249f), 0u);
  EXPECT_EQ(range_encode(f, 0.125f), 1u);
  EXPECT_EQ(range_encode(f, 100.0f), 33u);
  EXPECT_EQ(range_decode(f, 33), 2.0f);
  EXPECT_EQ(range_decode(f, range_encode(f, -0.256f)), -0.25f);
}

TEST(RangeFloats, OnTheUnitIntervalAreTheClosedForm) {
  FftScheme scheme;
  scheme.bits = 8;
  scheme.mantissa = 4;
  const RangeFloat f = range_float_of(scheme);
  EXPECT_EQ(f.most(), 255u);
  EXPECT_EQ(range_encode(f, 1.0f), 128u);
  EXPECT_EQ(range_decode(f, 128), 1.0f);
  EXPECT_EQ(range_encode(f, -1.0f), 255u);
  EXPECT_EQ(range_decode(f, 255), -0.96875f);
  EXPECT_NEAR(range_decode(f, 1), 4.2e-3, 1e-4);
  scheme.truncate = true;
  EXPECT_EQ(range_encode(range_float_of(scheme), 0.999f), 127u);
  const float eps = range_decode(f, 1);
  EXPECT_EQ(range_encode(f, eps * 0.5f), 1u);  // rounding: zero below half of the least
  EXPECT_EQ(range_encode(f, eps * 0.4999f), 0u);
  for (uint32_t code = 0; code <= f.most(); ++code) EXPECT_EQ(range_encode(f, range_decode(f, code)), code);
}

TEST(RangeFloats, RoundToTheNearest) {
  for (const uint8_t width : {4, 6, 8, 10}) {
    FftScheme scheme;
    scheme.bits = width;
    scheme.mantissa = static_cast<uint8_t>(width / 2);
    const RangeFloat f = range_float_of(scheme);
    for (float x : white(2000, 41)) {
      x = std::clamp(x / 4, -1.0f, 1.0f);
      double best = 9;
      for (uint32_t code = 0; code <= f.most(); ++code)
        best = std::min(best, std::abs(double{range_decode(f, code)} - x));
      EXPECT_EQ(std::abs(double{range_decode(f, range_encode(f, x))} - x), best) << x;
    }
  }
}

}  // namespace
}  // namespace gradwire
