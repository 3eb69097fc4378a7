// SPDX-License-Identifier: Apache-2.0
// The methods everybody compares with, as parameters over the bodies. docs/algorithms.md has the formulas, the bounds
// and where we deviate.
#include "codec/define.h"
#include "codec/topk/cpu.h"

namespace gradwire {
namespace {

using Type = Parameter::Type;

Parameter mode_parameter(const std::string& what) {
  return {"mode",
          Type::choice,
          "tile",
          0,
          0,
          {"tile", "paper"},
          what + ": tiles of 32768 elements, or the whole tensor as published"};
}

uint32_t unit_of(const Values& v) { return v.choice("mode") == "paper" ? 0 : kTile; }

CodecDef cast(const std::string& name, const std::string& summary, Body body, uint8_t bits, bool lossless) {
  return {
      name,
      summary,
      name,
      {},
      [=](const Values&) { return Scheme{.body = body, .bits = bits}; },
      [=](const Values&) { return Traits{.lossless = lossless, .unbiased = lossless, .feedback = false, .unit = 1}; }};
}

}  // namespace

CodecDef codec_fp32() { return cast("fp32", "full precision: every finite value exactly", Body::cast32, 32, true); }
CodecDef codec_fp16() { return cast("fp16", "IEEE half precision, rounded to nearest even", Body::cast16, 16, false); }
CodecDef codec_bf16() { return cast("bf16", "bfloat16, rounded to nearest even", Body::castb16, 16, false); }

// Alistarh et al., QSGD, NIPS 2017. Levels -s..s with s = 2^(bits-1) - 1 of a norm per bucket.
CodecDef codec_qsgd() {
  return {"qsgd",
          "uniform levels of a norm per bucket, rounded at random so that the mean is right (QSGD)",
          "qsgd:bits=4,bucket=1024,norm=max",
          {{"bits",
            Type::integer,
            "4",
            2,
            8,
            {},
            "bits of a code, sign included: 2^(bits-1) - 1 levels on each side of zero"},
           {"bucket", Type::power_of_two, "1024", 64, kTile, {}, "elements that share a norm"},
           {"norm",
            Type::choice,
            "max",
            0,
            0,
            {"max", "l2"},
            "the bucket's norm: largest magnitude, or Euclidean as published"},
           {"rounding",
            Type::choice,
            "random",
            0,
            0,
            {"random", "nearest"},
            "random is unbiased; nearest has the least error and wants feedback"}},
          [](const Values& v) {
            return Scheme{.body = Body::uniform,
                          .stat = v.choice("norm") == "l2" ? Stat::l2 : Stat::absmax,
                          .bits = static_cast<uint8_t>(v.integer("bits")),
                          .nearest = v.choice("rounding") == "nearest",
                          .side = 1,
                          .unit = v.integer("bucket")};
          },
          [](const Values& v) {
            const bool random = v.choice("rounding") == "random";
            return Traits{.lossless = false, .unbiased = random, .feedback = !random, .unit = v.integer("bucket")};
          }};
}

// Wen et al., TernGrad, NIPS 2017: clip at a few standard deviations, then -1, 0 or 1 times the largest magnitude left.
CodecDef codec_terngrad() {
  return {"terngrad",
          "three levels of the largest magnitude after clipping at a few standard deviations (TernGrad)",
          "terngrad:clip=2.5",
          {{"clip",
            Type::real,
            "2.5",
            0,
            100,
            {},
            "where to clip, in standard deviations of the unit; 0: nowhere (unbiased)"},
           mode_parameter("what shares a scale")},
          [](const Values& v) {
            return Scheme{.body = Body::uniform,
                          .stat = Stat::clip,
                          .bits = 2,
                          .side = 1,
                          .unit = unit_of(v),
                          .clip = static_cast<float>(v.real("clip"))};
          },
          [](const Values& v) {
            return Traits{.lossless = false, .unbiased = v.real("clip") == 0, .feedback = false, .unit = unit_of(v)};
          }};
}

// Seide et al., 1-bit SGD, Interspeech 2014: the sign, and the mean of each side.
CodecDef codec_onebit() {
  return {"onebit",
          "the sign, with the mean of the negative and of the other values (1-bit SGD); wants feedback",
          "onebit",
          {mode_parameter("what shares the two means")},
          [](const Values& v) {
            return Scheme{.body = Body::sign, .stat = Stat::signs, .bits = 1, .side = 2, .unit = unit_of(v)};
          },
          [](const Values& v) {
            return Traits{.lossless = false, .unbiased = false, .feedback = true, .unit = unit_of(v)};
          }};
}

CodecDef codec_topk() {
  return {"topk",
          "the strongest values, exactly, with their places; wants feedback",
          "topk:ratio=0.01",
          {{"ratio", Type::real, "0.01", 1e-6, 1, {}, "share of the values that are kept; at least one a unit"},
           mode_parameter("what the strongest are chosen among")},
          [](const Values& v) { return Scheme{.body = Body::select, .unit = unit_of(v), .ratio = v.real("ratio")}; },
          [](const Values& v) {
            return Traits{.lossless = false, .unbiased = false, .feedback = true, .unit = unit_of(v)};
          },
          {},
          {},
          &kTopkUnits};
}

}  // namespace gradwire
