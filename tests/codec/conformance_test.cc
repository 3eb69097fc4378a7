// SPDX-License-Identifier: Apache-2.0
// What every codec promises, on every device that is here. The tests range over the registry: a codec that is
// registered is tested, with its default and with each parameter at its ends and in each of its choices.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <sstream>
#include <tuple>

#include "codec/define.h"
#include "codec/reference.h"
#include "codec/test_devices.h"
#include "gradwire/error.h"
#include "gradwire/message.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace gradwire {
std::ostream& operator<<(std::ostream& out, const Codec& codec) {
  return out << codec.str() << (codec.table().empty() ? "" : " (fitted)");
}
}  // namespace gradwire

namespace gradwire::test {
namespace {

std::vector<CodecDef> definitions() {
  return {
#define GW_CODEC(name) codec_##name(),
#include "codec/codecs.def"
#undef GW_CODEC
  };
}

std::string fmt_number(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

// Each parameter's ends and choices, one at a time, and the specs that the codec itself names; values that do not go
// with the others' defaults are left to those.
std::vector<Codec> specs() {
  std::vector<Codec> all;
  const auto add = [&](const Codec& codec) {
    if (std::find(all.begin(), all.end(), codec) == all.end()) all.push_back(codec);
  };
  for (const CodecDef& def : definitions()) {
    const Codec fallback = Codec::parse(def.name);
    add(fallback);
    for (const Parameter& p : def.parameters) {
      if (p.learning) continue;
      std::vector<std::string> values = p.choices;
      if (p.choices.empty()) {
        values = {fmt_number(p.low), fmt_number(p.high)};
        if (p.type == Parameter::Type::integer)
          for (int v = static_cast<int>(p.low) + 1; v < p.high && p.high - p.low < 16; ++v)
            values.push_back(std::to_string(v));
        if (p.type == Parameter::Type::power_of_two) values.insert(values.end(), {"128", "512", "4096"});
        if (p.type == Parameter::Type::real) values.insert(values.end(), {"0.1"});
      }
      for (const std::string& value : values) {
        try {
          add(fallback.with(p.name, value));
        } catch (const Error& error) {
          EXPECT_EQ(error.field(), p.name) << "a value that does not go with the other parameters' defaults";
        }
      }
    }
  }
  for (const CodecInfo& info : codecs())
    for (const std::string& spec : info.specs) add(Codec::parse(spec));
  const auto words = [](std::vector<float> values) {
    std::vector<uint32_t> table;
    for (float value : values) table.push_back(float_bits(value));
    return table;
  };
  add(Codec::parse("optquant:bits=2").fitted(words({-1, 0, 1})));
  add(Codec::parse("optquant:bits=3").fitted(words({-1, -0.301f, -0.108f, 0, 0.108f, 0.301f, 1})));
  add(Codec::parse("optquant:bits=3,mode=biased")
          .fitted(words({-0.6f, -0.3f, -0.15f, -0.05f, 0.05f, 0.15f, 0.3f, 0.6f})));
  add(Codec::parse("optquant:bits=4,mode=biased,kappa=0.25")
          .fitted(
              words({-0.9f, -0.6f, -0.4f, -0.3f, -0.2f, -0.1f, -0.05f, 0, 0.05f, 0.1f, 0.2f, 0.3f, 0.4f, 0.6f, 0.9f})));
  add(Codec::parse("optquant:bits=2").fitted(words({-1, 0, 0.2f, 1})));
  add(Codec::parse("optquant:bits=3").fitted(words({-1, -0.01f, 0, 0.05f, 0.1f, 0.2f, 0.4f, 1})));
  add(Codec::parse("optquant:bits=2,mode=biased").fitted(words({0.01f, 0.1f, 0.3f, 0.8f})));
  add(Codec::parse("dqsgd").fitted(std::vector<uint32_t>{0}));
  add(Codec::parse("dqsgd").fitted(std::vector<uint32_t>{11}));
  add(Codec::parse("rangefloat").fitted(std::vector<uint32_t>{6}));
  return all;
}

TEST(Conformance, EveryCodecHasAReference) {
  for (const CodecInfo& info : codecs())
    EXPECT_TRUE(references().count(info.name))
        << info.name << " is registered; tests/codec/reference.h has no row for it";
  for (const auto& [name, reference] : references()) EXPECT_NO_THROW(Codec::parse(name)) << "nothing is tested by it";
}

const std::vector<uint64_t> kSizes = {0, 1, 7, 31, 32, 33, 63, 65, 1023, 1024, 1025, 4099, 32767, 32768, 32769, 70001};

// Gaussian values with a few strong ones and a few zeros: never the same twice.
// Kept, because random numbers took a third of the time of these tests.
std::vector<float> data(uint64_t count, uint32_t seed = 1, float scale = 0.01f) {
  static std::map<std::tuple<uint64_t, uint32_t, float>, std::vector<float>> made;
  std::vector<float>& values = made[{count, seed, scale}];
  if (!values.empty()) return values;
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  values.resize(count);
  for (uint64_t i = 0; i < count; ++i) {
    values[i] = normal(generator) * scale * (i % 97 == 0 ? 8.0f : 1.0f);
    if (i % 61 == 5) values[i] = 0;
  }
  return values;
}

Plan plan_of(const Codec& codec, uint64_t count, DType dtype = DType::f32) {
  return Plan({{"w", count, dtype, codec}});
}
Plan plan_of(const std::string& spec, uint64_t count, DType dtype = DType::f32) {
  return plan_of(Codec::parse(spec), count, dtype);
}

uint64_t unit_of(const Codec& codec, uint64_t count) {
  return codec.traits().unit ? codec.traits().unit : std::max<uint64_t>(count, 1);
}

// Calls check(first element, values of the unit, decoded values of the unit).
template <class Check>
void for_units(const Codec& codec, const std::vector<float>& x, const std::vector<float>& y, Check check) {
  const uint64_t unit = unit_of(codec, x.size());
  for (uint64_t at = 0; at < x.size(); at += unit) {
    const uint64_t n = std::min<uint64_t>(unit, x.size() - at);
    check(at, std::vector<double>(x.begin() + at, x.begin() + at + n),
          std::vector<double>(y.begin() + at, y.begin() + at + n));
  }
}

// Where thresholds decide, the unit's error must be that of the reference.
void expect_same_error(const Codec& codec, const Expectation& e, const std::vector<double>& in,
                       const std::vector<double>& out) {
  if (!e.sum || in.size() < 64)
    return;  // a few elements: a tie between two equal frequencies may make all the difference
  double want = 0, got = 0;
  for (size_t i = 0; i < in.size(); ++i) {
    want += std::pow(e.value[i] - in[i], 2);
    got += std::pow(out[i] - in[i], 2);
  }
  const double n = static_cast<double>(in.size());
  ASSERT_NEAR(std::sqrt(got / n), std::sqrt(want / n), 0.01 * std::sqrt(want / n) + e.slack)
      << codec << " of " << in.size();
}

void expect_within_bound(const Codec& codec, const std::vector<float>& x, const std::vector<float>& y) {
  for_units(codec, x, y, [&](uint64_t at, const std::vector<double>& in, const std::vector<double>& out) {
    const Expectation e = expect(codec, in);
    for (size_t i = 0; i < in.size(); ++i)
      ASSERT_LE(e.miss(i, in[i], out[i]), e.slack)
          << codec << " element " << at + i << " of " << x.size() << ": " << in[i] << " -> " << out[i];
    expect_same_error(codec, e, in, out);
  });
}

TEST(Conformance, RoundTripWithinTheDerivedBound) {
  const TestDevice device(Device{});
  for (const Codec& spec : specs())
    for (uint64_t count : kSizes) {
      const Plan plan = plan_of(spec, count);
      const std::vector<float> x = data(count);
      const Raw message = device.encode(plan, {raw_of(x)}, {.seed = 3});
      expect_within_bound(spec, x, values_of(device.decode(plan, message)[0]));
    }
}

TEST(Conformance, EveryDeviceGivesTheSameBytesAndValues) {
  const std::vector<TestDevice> all = test_devices();
  for (const Codec& spec : specs())
    for (DType dtype : {DType::f32, DType::f16, DType::bf16})
      for (uint64_t count : kSizes) {
        if (dtype != DType::f32 && count > 5000 && count != 32769) continue;
        const Plan plan = plan_of(spec, count, dtype);
        const Raw x = raw_of(data(count, 7), dtype);
        const Stamp stamp{.seed = 11, .step = 5, .stage = 1, .rank = 2, .world = 4};
        const Raw message = all[0].encode(plan, {x}, stamp);
        const Raw decoded = all[0].decode(plan, message)[0];
        for (size_t b = 1; b < all.size(); ++b) {
          ASSERT_EQ(all[b].encode(plan, {x}, stamp), message)
              << spec << " " << name_of(dtype) << " " << count << " on " << all[b].name();
          ASSERT_EQ(all[b].decode(plan, message, Write::set, nullptr, &stamp)[0], decoded)
              << spec << " " << name_of(dtype) << " " << count << " on " << all[b].name();
        }
      }
}

TEST(Conformance, FeedbackIsTheSameOnEveryDeviceAndKeepsTheIdentity) {
  const std::vector<TestDevice> all = test_devices();
  for (const Codec& spec : specs())
    for (DType residual : {DType::f32, DType::bf16})
      for (float scale : {1.0f, 1024.0f})
        for (uint64_t count : {uint64_t{1}, uint64_t{33}, uint64_t{1024}, uint64_t{5000}, uint64_t{33000}}) {
          const Plan plan = plan_of(spec, count);
          const std::vector<float> g = data(count, 3, 0.01f * scale);
          const TestFeedback feedback{{raw_of(data(count, 4, 0.003f), residual)}, residual, scale};
          std::vector<Raw> after;
          const Raw message = all[0].encode(plan, {raw_of(g)}, {.seed = 1}, &feedback, &after);
          const std::vector<float> sent = values_of(all[0].decode(plan, message)[0]);
          const std::vector<float> before = values_of(feedback.before[0], residual),
                                   left = values_of(after[0], residual);
          for (uint64_t i = 0; i < count; ++i) {
            // x = g + S e and x - sent are each rounded once (2^-24 of the larger operand), a bf16 residual again
            // (2^-8).
            const double x = static_cast<double>(g[i]) + static_cast<double>(scale) * before[i];
            const double off = std::fabs(sent[i] + static_cast<double>(scale) * left[i] - x);
            const double size = std::fabs(x) + std::fabs(sent[i]);
            ASSERT_LE(off, size * 0x1p-22 + (residual == DType::bf16 ? scale * std::fabs(left[i]) * 0x1p-8 : 0) + 1e-40)
                << spec << " " << i;
          }
          for (size_t b = 1; b < all.size(); ++b) {
            std::vector<Raw> other;
            ASSERT_EQ(all[b].encode(plan, {raw_of(g)}, {.seed = 1}, &feedback, &other), message)
                << spec << " " << count << " on " << all[b].name();
            ASSERT_EQ(other, after) << spec << " " << count << " on " << all[b].name();
          }
        }
}

// Results from 8 MB on are written past the caches where they are aligned, and residuals straight to their place: other
// loops than those for small tensors.
TEST(Conformance, LargeTensorsAreTheSameOnEveryTargetHoweverTheyAreAligned) {
  const uint64_t count = (2 << 20) + 1234;
  std::vector<float> g = data(count, 3, 0.01f);
  g[5000] = std::nanf("");
  g[700'000] = std::numeric_limits<float>::infinity();
  std::fill_n(g.begin() + 900'096, 2048, 0.0f);
  const std::vector<float> before = data(count, 4, 0.003f);
  struct Result {
    std::vector<std::byte> message;
    std::vector<float> after, decoded;
    bool operator==(const Result& o) const {
      const auto alike = [](const std::vector<float>& a, const std::vector<float>& b) {
        return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
      };
      return message == o.message && alike(after, o.after) && alike(decoded, o.decoded);
    }
  };
  std::vector<float> room(2 * count + 64);
  const auto run = [&](const Plan& plan, const std::string& simd, size_t shift) {
    const auto runner = make_runner(plan, {.simd = simd});
    const size_t to_line = (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64 / sizeof(float);
    float* const after = room.data() + to_line + shift;
    float* const decoded = after + (count + 15) / 16 * 16;
    std::fill(room.begin(), room.end(), 7.0f);
    Result result{std::vector<std::byte>(plan.message_bytes()), {}, {}};
    const void* in[] = {g.data()};
    const void* befores[] = {before.data()};
    void* afters[] = {after};
    void* out[] = {decoded};
    const Residuals residuals{befores, afters};
    runner->encode(in, {.seed = 5}, result.message, &residuals);
    runner->decode(result.message, out);
    result.after.assign(after, after + count);
    result.decoded.assign(decoded, decoded + count);
    EXPECT_EQ(after[count], 7.0f) << "written beyond the end";
    return result;
  };
  std::vector<std::string> all;
  for (const CodecInfo& info : codecs()) {
    all.push_back(info.example);
    all.insert(all.end(), info.specs.begin(), info.specs.end());
  }
  for (const std::string& spec : all) {
    const Plan plan = plan_of(Codec::parse(spec), count);
    const Result reference = run(plan, "scalar", 0);
    EXPECT_EQ(std::memcmp(&reference.after[5000], &before[5000], sizeof(float)), 0)
        << spec << ": a marked unit keeps it";
    for (const std::string& simd : simd_targets())
      for (size_t shift : {0, 1})
        ASSERT_TRUE(run(plan, simd, shift) == reference) << spec << " " << simd << " " << shift;
  }
}

TEST(Conformance, SameSeedSameBytesAndEveryPartOfTheKeyCounts) {
  const TestDevice device(Device{});
  for (const Codec& spec : specs()) {
    const Codec& codec = spec;
    const Plan plan = plan_of(spec, 5000);
    const Raw x = raw_of(data(5000));
    const Stamp stamp{.seed = 1, .step = 2, .stage = 0, .rank = 1, .world = 3};
    const Raw message = device.encode(plan, {x}, stamp);
    EXPECT_EQ(device.encode(plan, {x}, stamp), message) << spec;
    if (!codec.traits().unbiased || codec.traits().lossless || codec.bytes(5000) == 0) continue;
    Stamp others[4] = {stamp, stamp, stamp, stamp};
    others[0].seed = 2;
    others[1].step = 3;
    others[2].stage = 1;
    others[3].rank = 2;
    for (const Stamp& other : others)
      EXPECT_NE(device.decode(plan, device.encode(plan, {x}, other)), device.decode(plan, message)) << spec;
    const Plan renamed({{"v", 5000, DType::f32, codec}});
    EXPECT_NE(device.decode(renamed, device.encode(renamed, {x}, stamp)), device.decode(plan, message)) << spec;
  }
}

TEST(Conformance, UnbiasedWhereItSaysSo) {
  // The mean of R rounded copies differs from the value by a mean-zero error of variance at most step^2 / (4 R), and by
  // the 2^-17 step that 16 random bits allow. Six sigma over 3000 elements: one false alarm in 10^5 seeds, and the
  // seeds are fixed.
  constexpr int kRepeats = 300;
  const TestDevice device(Device{});
  for (const Codec& spec : specs()) {
    const Codec& codec = spec;
    if (!codec.traits().unbiased || codec.traits().lossless || codec.bytes(3000) == 0) continue;
    const uint64_t count = 3000;
    const Plan plan = plan_of(spec, count);
    const std::vector<float> x = data(count, 5);
    std::vector<double> mean(count, 0);
    for (int r = 0; r < kRepeats; ++r) {
      const std::vector<float> y = values_of(
          device.decode(plan, device.encode(plan, {raw_of(x)}, {.seed = 100, .step = static_cast<uint64_t>(r)}))[0]);
      for (uint64_t i = 0; i < count; ++i) mean[i] += y[i] / static_cast<double>(kRepeats);
    }
    double drift = 0, spread = 0;
    for_units(codec, x, x, [&](uint64_t at, const std::vector<double>& in, const std::vector<double>&) {
      const Expectation e = expect(codec, in);
      for (size_t i = 0; i < in.size(); ++i) {
        // Beyond 8 bits the chance itself is rounded to 2^-8.
        const double step = e.gap(in[i]), sigma = step / std::sqrt(4.0 * kRepeats),
                     rounding = scheme_of(codec).bits > 8 ? 0x1p-9 : 0x1p-16;
        ASSERT_LE(std::fabs(mean[at + i] - in[i]), 6 * sigma + step * rounding + e.slack)
            << spec << " element " << at + i;
        drift += mean[at + i] - in[i];
        spread += sigma * sigma;
      }
    });
    EXPECT_LE(std::fabs(drift), 5 * std::sqrt(spread)) << spec << ": the sum over the elements drifts";
  }
}

TEST(Conformance, NeighboursRoundIndependentlyAndRanksAgainstEachOther) {
  const TestDevice device(Device{});
  const uint64_t count = 1 << 18;
  const Plan plan = plan_of("qsgd:bits=4", count);
  const std::vector<float> x = data(count, 6);
  std::vector<double> error[2];
  for (uint32_t rank : {0u, 1u}) {
    const std::vector<float> y =
        values_of(device.decode(plan, device.encode(plan, {raw_of(x)}, {.seed = 1, .rank = rank, .world = 2}))[0]);
    for (uint64_t i = 0; i < count; ++i) error[rank].push_back(y[i] - x[i]);
  }
  const auto correlation = [&](const std::vector<double>& a, const std::vector<double>& b, size_t lag) {
    double ab = 0, aa = 0, bb = 0;
    for (size_t i = 0; i + lag < a.size(); ++i)
      ab += a[i] * b[i + lag], aa += a[i] * a[i], bb += b[i + lag] * b[i + lag];
    return ab / std::sqrt(aa * bb);
  };
  const double limit = 5 / std::sqrt(static_cast<double>(count));
  // Of the same value, two ranks whose draws differ by half have errors with a correlation of -1/2, fractions being
  // uniform; those of these data are nearly so.
  EXPECT_NEAR(correlation(error[0], error[1], 0), -0.5, 0.1);
  for (size_t lag : {1, 2, 31, 32, 33, 64, 1023, 1024, 1025}) {
    EXPECT_LE(std::fabs(correlation(error[0], error[0], lag)), limit) << "lag " << lag;
    EXPECT_LE(std::fabs(correlation(error[0], error[1], lag)), limit) << "two ranks, lag " << lag;
  }
}

TEST(Conformance, ThreadsAndGroupingDoNotMatter) {
  for (const Codec& spec : specs()) {
    const Codec& codec = spec;
    const std::vector<std::pair<std::string, uint64_t>> parts = {{"a", 1000}, {"b", 0},     {"c", 70001},
                                                                 {"d", 3},    {"e", 33000}, {"f", 1024}};
    std::vector<TensorSpec> list;
    std::vector<Raw> in;
    for (const auto& [name, count] : parts) {
      list.push_back({name, count, DType::f32, codec});
      in.push_back(raw_of(data(count, static_cast<uint32_t>(count))));
    }
    const Plan together(list);
    const Stamp stamp{.seed = 9, .step = 1};
    const Raw message = TestDevice(Device{}).encode(together, in, stamp);
    const std::vector<Raw> decoded = TestDevice(Device{}).decode(together, message);
    for (int threads : {2, 5}) {
      EXPECT_EQ(TestDevice(Device{.threads = threads}).encode(together, in, stamp), message) << spec << " " << threads;
      EXPECT_EQ(TestDevice(Device{.threads = threads}).decode(together, message), decoded) << spec << " " << threads;
    }
    for (size_t i = 0; i < list.size(); ++i) {
      const Plan alone({list[i]});
      EXPECT_EQ(TestDevice(Device{}).decode(alone, TestDevice(Device{}).encode(alone, {in[i]}, stamp))[0], decoded[i])
          << spec << " " << list[i].name;
    }
    const TestDevice gpu(Device{.kind = cuda_devices() > 0 ? Device::Kind::cuda : Device::Kind::cpu});
    EXPECT_EQ(gpu.encode(together, in, stamp), message) << spec;
  }
}

TEST(Conformance, APieceDrawsTheRandomBitsOfItsPlaceInTheTensor) {
  const TestDevice device(Device{});
  for (const Codec& spec : specs()) {
    const Codec& codec = spec;
    if (codec.traits().unit == 0) continue;  // a piece is its own unit there
    const uint64_t count = kTileElements + 5000;
    const std::vector<float> x = data(count);
    const Plan whole = plan_of(spec, count), piece({{"w", 5000, DType::f32, codec, kTileElements}});
    const std::vector<float> tail(x.begin() + kTileElements, x.end());
    std::vector<float> y = values_of(device.decode(whole, device.encode(whole, {raw_of(x)}, {.seed = 2}))[0]);
    y.erase(y.begin(), y.begin() + kTileElements);
    EXPECT_EQ(values_of(device.decode(piece, device.encode(piece, {raw_of(tail)}, {.seed = 2}))[0]), y) << spec;
  }
}

TEST(Conformance, FrameIsNeverLargerThanBound) {
  for (const Codec& spec : specs())
    for (uint64_t count : kSizes) {
      const Codec& codec = spec;
      EXPECT_EQ(plan_of(spec, count).message_bytes(), bound(codec, count)) << spec;
      EXPECT_LE(codec.bytes(count), bound(codec, count)) << spec;
    }
}

TEST(Conformance, AddAddsToWhatIsThere) {
  for (const TestDevice& device : test_devices())
    for (const Codec& spec : specs())
      for (uint64_t count : {uint64_t{33}, uint64_t{1024}, uint64_t{33000}}) {
        const Plan plan = plan_of(spec, count);
        const Raw message = device.encode(plan, {raw_of(data(count))}, {.seed = 3});
        const std::vector<float> y = values_of(device.decode(plan, message)[0]);
        const std::vector<float> start = data(count, 99);
        const std::vector<Raw> begin = {raw_of(start)};
        const std::vector<float> sum = values_of(device.decode(plan, message, Write::add, &begin)[0]);
        for (uint64_t i = 0; i < count; ++i) ASSERT_EQ(sum[i], start[i] + y[i]) << spec << " on " << device.name();
      }
}

TEST(Conformance, NotANumberMarksItsUnitAndNothingElse) {
  const float bad_values[] = {std::nanf(""), HUGE_VALF, -HUGE_VALF, bits_float(0xffc12345u)};
  for (const TestDevice& device : test_devices())
    for (const Codec& spec : specs()) {
      const Codec& codec = spec;
      if (codec.bytes(1) == 0) continue;  // nothing is sent that could be marked
      for (uint64_t count : {uint64_t{1}, uint64_t{1500}, uint64_t{70000}})
        for (size_t b = 0; b < 4; ++b) {
          const uint64_t where = count * (b + 1) / 5, unit = unit_of(codec, count);
          std::vector<float> x = data(count);
          x[where] = bad_values[b];
          const Plan plan = plan_of(spec, count);
          const TestFeedback feedback{{raw_of(data(count, 8))}};
          std::vector<Raw> after;
          const Raw message = device.encode(plan, {raw_of(x)}, {.seed = 1}, &feedback, &after);
          const std::vector<float> y = values_of(device.decode(plan, message)[0]), left = values_of(after[0]),
                                   before = values_of(feedback.before[0]);
          for (uint64_t i = 0; i < count; ++i) {
            const bool marked = i / unit == where / unit;
            ASSERT_EQ(std::isnan(y[i]), marked)
                << spec << " element " << i << " of " << count << " on " << device.name();
            if (marked) {
              ASSERT_EQ(left[i], before[i]) << spec << ": the residual of a marked unit stays";
            }
            ASSERT_TRUE(std::isfinite(left[i])) << spec;
          }
        }
    }
}

TEST(Conformance, FiniteValuesThatDoNotFitAreMarkedNotClamped) {
  for (const TestDevice& device : test_devices()) {
    const std::vector<float> x = {65504.0f, 65519.99f, 65520.0f, -70000.0f, 3.4e38f, 1.0f};
    const Plan fp16 = plan_of("fp16", x.size()), bf16 = plan_of("bf16", x.size());
    const std::vector<float> h = values_of(device.decode(fp16, device.encode(fp16, {raw_of(x)}, {}))[0]);
    EXPECT_EQ(h[0], 65504.0f);
    EXPECT_EQ(h[1], 65504.0f);
    for (int i : {2, 3, 4}) EXPECT_TRUE(std::isnan(h[i])) << i;
    EXPECT_EQ(h[5], 1.0f);
    const std::vector<float> top = {3.3895314e38f, 3.4e38f, 0, 0, 0, 0};
    const std::vector<float> b = values_of(device.decode(bf16, device.encode(bf16, {raw_of(top)}, {}))[0]);
    EXPECT_EQ(b[0], 3.3895314e38f);
    EXPECT_TRUE(std::isnan(b[1]));
  }
}

TEST(Conformance, ExtremeScalesStayWithinTheBound) {
  // Subnormal units, units at the top of the range, and units that mix both.
  for (const TestDevice& device : test_devices())
    for (const Codec& spec : specs()) {
      const Codec& codec = spec;
      if (codec.name() == "fp16") continue;  // does not hold such values
      for (float scale : {1e-45f, 1e-41f, 3e-38f, 1e-30f, 4e37f}) {
        std::vector<float> x = data(3000, 12, 1.0f);
        for (float& v : x) v = std::clamp(v, -8.0f, 8.0f) * scale;
        const Plan plan = plan_of(spec, x.size());
        const std::vector<float> y = values_of(device.decode(plan, device.encode(plan, {raw_of(x)}, {.seed = 4}))[0]);
        for_units(codec, x, y, [&](uint64_t at, const std::vector<double>& in, const std::vector<double>& out) {
          const double top = largest(in);
          const Expectation e = expect(codec, in);
          // The step itself is rounded to a multiple of 2^-149, and the top level is `levels` of them away.
          const double slack =
              e.slack + 1e-3 * top + (200 + std::ldexp(1.0, std::min<int>(scheme_of(codec).bits, 16) - 1)) * 0x1p-149;
          for (size_t i = 0; i < in.size(); ++i) {
            ASSERT_TRUE(std::isfinite(out[i]))
                << spec << " scale " << scale << " element " << at + i << " on " << device.name();
            // Where levels are a few of the least floats apart, they are no longer evenly spaced.
            const double miss = e.exact || e.sum || !e.grid.empty()
                                    ? e.miss(i, in[i], out[i])
                                    : std::fabs(out[i] - std::clamp(in[i], -e.clip, e.clip)) - e.step;
            ASSERT_LE(miss, slack) << spec << " scale " << scale << " element " << at + i << ": " << in[i] << " -> "
                                   << out[i];
          }
          if (top > 1e-42) expect_same_error(codec, e, in, out);
        });
      }
    }
}

#if defined(__x86_64__)
TEST(Conformance, TheCallersFlushToZeroDoesNotMatter) {
  for (const Codec& spec : specs()) {
    std::vector<float> x = data(5000, 12, 1e-39f);
    const Plan plan = plan_of(spec, x.size());
    const TestFeedback feedback{{raw_of(data(5000, 13, 1e-39f))}};
    for (int threads : {1, 3}) {
      const TestDevice device(Device{.threads = threads});
      std::vector<Raw> after, after_flushed;
      const Raw message = device.encode(plan, {raw_of(x)}, {.seed = 4}, &feedback, &after);
      const std::vector<Raw> decoded = device.decode(plan, message);
      const unsigned saved = _mm_getcsr(), flush = saved | 0x8040 | 0x6000;  // FTZ, DAZ, round towards zero
      _mm_setcsr(flush);
      const Raw flushed = device.encode(plan, {raw_of(x)}, {.seed = 4}, &feedback, &after_flushed);
      const std::vector<Raw> decoded_flushed = device.decode(plan, message);
      const unsigned found = _mm_getcsr();
      _mm_setcsr(saved);
      EXPECT_EQ(flushed, message) << spec;
      EXPECT_EQ(after_flushed, after) << spec;
      EXPECT_EQ(decoded_flushed, decoded) << spec;
      EXPECT_EQ(found & 0xffc0u, flush & 0xffc0u) << "the caller's mode is put back";
    }
  }
}
#endif

void expect_mixed_lists_agree(const std::vector<Codec>& all, const std::vector<TestDevice>& places) {
  std::vector<TensorSpec> list;
  std::vector<Raw> in;
  for (size_t i = 0; i < all.size(); ++i) {
    const DType dtype = static_cast<DType>(i % 3);
    const uint64_t count = (i * 7919) % 4000;
    list.push_back({"t" + std::to_string(i), count, dtype, all[i]});
    in.push_back(raw_of(data(count, static_cast<uint32_t>(i)), dtype));
  }
  const Plan plan(list);
  const Raw message = places[0].encode(plan, in, {.seed = 5});
  const std::vector<Raw> decoded = places[0].decode(plan, message);
  for (const TestDevice& device : places) {
    EXPECT_EQ(device.encode(plan, in, {.seed = 5}), message) << device.name();
    EXPECT_EQ(device.decode(plan, message), decoded) << device.name();
  }
}

TEST(Conformance, ListsMixCodecsAndTypes) { expect_mixed_lists_agree(specs(), test_devices()); }

TEST(Specs, PrintingIsTheInverseOfParsing) {
  for (const Codec& spec : specs()) {
    EXPECT_EQ(Codec::parse(spec.str()).str(), spec.str());
    EXPECT_EQ(Codec::parse(spec.str()).fitted(spec.table()), spec);
  }
  EXPECT_EQ(Codec().str(), "fp32");
  EXPECT_EQ(Codec::parse("qsgd:norm=l2,bits=3"), Codec::parse("qsgd:bits=3,norm=l2"));
}

TEST(Specs, WhatIsWrongIsNamed) {
  const struct {
    const char *spec, *field, *words;
  } cases[] = {
      {"", "codec", "known are"},
      {"qsdg", "codec", "known are"},
      {"qsgd:", "codec", "colon"},
      {"qsgd:bits=4,", "codec", "comma"},
      {"qsgd:bit=4", "bit", "allowed are bits"},
      {"qsgd:bits", "bits", "no value"},
      {"qsgd:bits=1", "bits", "from 2 to 8"},
      {"qsgd:bits=9", "bits", "from 2 to 8"},
      {"qsgd:bits=four", "bits", "'four'"},
      {"qsgd:bits=4,bits=4", "bits", "twice"},
      {"qsgd:bucket=1000", "bucket", "power of two"},
      {"qsgd:bucket=99999999999999999999", "bucket", "power of two"},
      {"qsgd:norm=l3", "norm", "max, l2"},
      {"topk:ratio=0", "ratio", "from 1e-06 to 1"},
      {"topk:ratio=nan", "ratio", "'nan'"},
      {"topk:bits=12", "bits", "one of 32, 16, 8"},
      {"topk:bits=2,mode=paper", "bits", "only bits=32 with index=raw"},
      {"topk:index=coded,mode=paper", "index", "only bits=32 with index=raw"},
      {"terngrad:clip=-1", "clip", "from 0 to 100"},
      {"fp32:bits=4", "bits", "takes none"},
  };
  for (const auto& c : cases) {
    try {
      Codec::parse(c.spec);
      FAIL() << c.spec << " was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::usage) << c.spec;
      EXPECT_EQ(e.field(), c.field) << c.spec;
      EXPECT_NE(std::string(e.what()).find(c.words), std::string::npos) << c.spec << ": " << e.what();
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
    }
  }
}

TEST(Specs, LowRankIsRefusedByName) {
  try {
    Codec::parse("lowrank:rank=4");
    FAIL() << "it was accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::unsupported);
    EXPECT_EQ(e.field(), "codec");
    EXPECT_NE(std::string(e.what()).find("no codec of messages"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace gradwire::test
