// SPDX-License-Identifier: Apache-2.0
// The golden frames: which messages are pinned in tests/wire/golden, and from what input. make_golden.cc writes them
// once; message_test.cc encodes the same input again and wants the same bytes. The input is a function of (seed,
// index), so that any program in any language can make it:
//
//   state = state * 6364136223846793005 + 1442695040888963407   (u64), from state = seed, once before each value
//   u = ((state >> 40) - 2^23) * 2^-23;   x = ((u * u) * u) * scale   (each an f32 operation)
//
// then what the tensor's `edit` says. Tensors of f16 or bf16 hold x rounded to that type.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/bits.h"
#include "gradwire/message.h"
#include "gradwire/runner.h"

namespace golden {

using namespace gradwire;

enum class Edit {
  none,
  not_finite,  // NaN, +Inf and -Inf at elements 5, 100 and 200, and at 70 the largest f32
  extremes,    // every 7th the largest f32, every 11th its negative, every 13th -0
  ties,        // rounded to 3 magnitudes, so that a selection must break ties by index
  zeros,       // elements 0 to 1023 are 0, every other one of them -0
  negative,    // all below zero
  largest,     // all of the largest magnitude, every third negative
};

struct Tensor {
  TensorSpec spec;
  uint64_t seed;
  float scale = 0.01f;
  Edit edit = Edit::none;
};

struct GoldenCase {
  std::string name;
  std::vector<Tensor> tensors;
  Stamp stamp = {.seed = 1, .step = 7, .stage = 0, .rank = 0, .world = 1};
  bool large = false;  // no files of the input and the decoded values: they are too big to keep, their hashes do
};

inline GoldenCase one(const std::string& name, const std::string& spec, uint64_t count, float scale = 0.01f,
                      Edit edit = Edit::none, DType dtype = DType::f32) {
  return {name, {{{"w", count, dtype, Codec::parse(spec)}, count + 1, scale, edit}}};
}

inline GoldenCase one(const std::string& name, const Codec& codec, uint64_t count, float scale = 0.01f,
                      Edit edit = Edit::none, DType dtype = DType::f32) {
  return {name, {{{"w", count, dtype, codec}, count + 1, scale, edit}}};
}

// What codecs learn, made up here: any table that is allowed is as good.
inline Codec fitted(const std::string& spec, std::vector<uint32_t> words) { return Codec::parse(spec).fitted(words); }

// optquant: q * |q| of evenly spaced q, the ends at -reach and reach.
inline std::vector<uint32_t> levels(int count, float reach = 1.0f) {
  std::vector<uint32_t> words;
  for (int i = 0; i < count; ++i) {
    const float q = static_cast<float>(2 * i - (count - 1)) / static_cast<float>(count - 1);
    words.push_back(float_bits(q * std::fabs(q) * reach));
  }
  return words;
}

// The same with three times as many levels above zero as below.
inline std::vector<uint32_t> skewed_levels(int count) {
  std::vector<uint32_t> words;
  for (int i = 0; i < count; ++i) {
    const float q = static_cast<float>(4 * i - (count - 1)) / static_cast<float>(count - 1);
    words.push_back(float_bits(i == count - 1 ? 1.0f : q < 0 ? -q * q : q * q / 9));
  }
  return words;
}

// casq: thresholds at whole and half root mean squares, then a word for each cluster.
inline std::vector<uint32_t> clusters(int bits, const std::vector<uint32_t>& words) {
  const int half = 1 << (bits - 1);
  std::vector<uint32_t> table;
  for (int i = 1 - half; i < half; ++i) table.push_back(float_bits(static_cast<float>(i) * (i < 0 ? 1.0f : 0.5f)));
  table.insert(table.end(), words.begin(), words.end());
  return table;
}

// fft: a mantissa, then theta as a double, the lower word first.
inline std::vector<uint32_t> frequencies(uint32_t mantissa, double theta) {
  const uint64_t bits = std::bit_cast<uint64_t>(theta);
  return {mantissa, static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
}

// topk with packed values and places.
inline void add_packed(std::vector<GoldenCase>& all) {
  for (const int bits : {1, 2, 3, 4, 5, 6, 7, 8, 16})
    all.push_back(one(fmt::format("topk_bits{}", bits), fmt::format("topk:ratio=0.1,bits={}", bits), 700));
  for (const char* index : {"raw", "bitmap"})
    all.push_back(one(fmt::format("topk_bits3_{}", index), fmt::format("topk:ratio=0.07,bits=3,index={}", index), 333));
  for (const char* index : {"coded", "bitmap"})
    all.push_back(one(fmt::format("topk_{}", index), fmt::format("topk:ratio=0.05,index={}", index), 301));
  all.push_back(one("topk_coded_all", "topk:ratio=1,bits=4", 70));
  all.push_back(one("topk_coded_1", "topk:bits=2", 1));
  all.push_back(one("topk_coded_ties", "topk:ratio=0.1,bits=3", 700, 0.01f, Edit::ties));
  for (const int bits : {1, 2, 16})
    all.push_back(one(fmt::format("topk_bits{}_not_finite", bits), fmt::format("topk:ratio=0.05,bits={}", bits), 210,
                      0.01f, Edit::not_finite));
  all.push_back(one("topk_coded_not_finite", "topk:ratio=0.05,index=coded", 210, 0.01f, Edit::not_finite));
  for (const int bits : {2, 8, 16}) {
    const std::string spec = fmt::format("topk:ratio=0.3,bits={}", bits);
    all.push_back(one(fmt::format("topk_bits{}_extremes", bits), spec, 130, 1e38f, Edit::extremes));
    all.push_back(one(fmt::format("topk_bits{}_subnormal", bits), spec, 70, 1e-41f));
  }
  all.push_back(one("topk_bits2_zeros", "topk:ratio=0.1,bits=2", 70, 0.01f, Edit::zeros));
  all.push_back(one("topk_bits2_bf16", "topk:ratio=0.1,bits=2", 300, 0.01f, Edit::none, DType::bf16));
}

// The codecs of methods.cc: a code an element.
inline void add_methods(std::vector<GoldenCase>& all) {
  for (uint64_t count : {0, 1, 33, 1025}) all.push_back(one(fmt::format("optquant_{}", count), "optquant", count));
  for (int bits = 2; bits <= 8; ++bits) {
    const std::string spec = fmt::format("optquant:bits={}", bits);
    all.push_back(one(fmt::format("optquant_bits{}", bits), spec, 1061));
    all.push_back(one(fmt::format("optquant_biased{}", bits), spec + ",mode=biased", 300));
    all.push_back(one(fmt::format("optquant_fitted{}", bits), fitted(spec, levels((1 << bits) - 1)), 300));
  }
  all.push_back(one("optquant_fitted_even", fitted("optquant:bits=3,bucket=64", levels(8)), 1061));
  all.push_back(one("optquant_fitted_short", fitted("optquant:bits=5,mode=biased", levels(31, 0.75f)), 1061));
  for (int bits : {3, 4, 6})
    all.push_back(one(fmt::format("optquant_skewed{}", bits),
                      fitted(fmt::format("optquant:bits={}", bits), skewed_levels(1 << bits)), 1061));
  all.push_back(one("optquant_kappa", "optquant:bits=3,mode=biased,kappa=0.25", 1061));
  all.push_back(one("optquant_kappa0", "optquant:mode=biased,kappa=0", 300));
  all.push_back(one("optquant_bucket2048", "optquant:bucket=2048", 2500));

  for (uint64_t count : {0, 1, 33, 1025}) all.push_back(one(fmt::format("nuqsgd_{}", count), "nuqsgd", count));
  for (int bits : {2, 3, 5, 6, 7, 8})
    all.push_back(one(fmt::format("nuqsgd_bits{}", bits), fmt::format("nuqsgd:bits={}", bits), 1061));
  all.push_back(one("nuqsgd_bucket64", "nuqsgd:bits=3,bucket=64", 333));
  all.push_back(one("nuqsgd_bucket2048", "nuqsgd:bucket=2048", 2500));
  all.push_back(one("nuqsgd_l2", "nuqsgd:bits=5,norm=l2", 1100));
  all.push_back(one("nuqsgd_nearest", "nuqsgd:rounding=nearest", 200));
  all.push_back(one("nuqsgd_zeros", "nuqsgd:bits=3", 1056, 0.01f, Edit::zeros));
  all.push_back(one("nuqsgd_not_finite", "nuqsgd:bucket=64", 300, 0.01f, Edit::not_finite));

  for (uint64_t count : {1, 33, 1025}) all.push_back(one(fmt::format("dqsgd_{}", count), "dqsgd", count));
  for (uint32_t bits = 2; bits <= 16; ++bits)
    all.push_back(one(fmt::format("dqsgd_bits{}", bits), fitted("dqsgd", {bits}), bits == 9 ? 1061 : 1030));
  all.push_back(one("dqsgd_nothing", fitted("dqsgd", {0}), 2048));
  all.push_back(one("dqsgd_budget", "dqsgd:budget=11.5,min=4,max=14,norm=l2,bucket=256", 600));
  all.push_back(one("dqsgd_bucket2048", fitted("dqsgd:bucket=2048", {9}), 2500));
  all.push_back(one("dqsgd_l2", fitted("dqsgd:norm=l2,bucket=64", {11}), 300));

  for (uint64_t count : {1, 33, 1025}) all.push_back(one(fmt::format("rangefloat_{}", count), "rangefloat", count));
  for (int bits = 4; bits <= 16; ++bits)
    all.push_back(one(fmt::format("rangefloat_bits{}", bits), fmt::format("rangefloat:bits={}", bits), 1061));
  all.push_back(one("rangefloat_fitted", fitted("rangefloat:bits=10,bucket=64", {3}), 300));
  all.push_back(one("rangefloat_mantissa", "rangefloat:bits=12,mantissa=1,scale=tensor", 1100));
  all.push_back(one("rangefloat_paper", "rangefloat:mode=paper", 300));
  all.push_back(one("rangefloat_max", "rangefloat:max=0.005", 300));
  all.push_back(
      one("rangefloat_min_max_eps", "rangefloat:bits=9,mantissa=4,min=-0.002,max=0.006,eps=0.00001,mode=paper", 300));
  all.push_back(one("rangefloat_eps", "rangefloat:bits=7,max=0.01,eps=0.0002", 300));

  for (uint64_t count : {1, 33, 1025}) all.push_back(one(fmt::format("loggrid_{}", count), "loggrid", count));
  for (int k : {0, 1, 6, 14, 30})
    all.push_back(one(fmt::format("loggrid_k{}", k), fmt::format("loggrid:k={}", k), 1061));
  all.push_back(one("loggrid_tensor", "loggrid:k=3,scale=tensor", 1100));

  for (uint64_t count : {1, 33, 1025}) all.push_back(one(fmt::format("unigrid_{}", count), "unigrid", count));
  for (int bits = 2; bits <= 16; ++bits)
    all.push_back(one(fmt::format("unigrid_bits{}", bits), fmt::format("unigrid:bits={}", bits), 1030));
  all.push_back(one("unigrid_range", "unigrid:range=0.003,bits=12", 300));
  all.push_back(one("unigrid_tensor", "unigrid:bits=6,scale=tensor", 1100));

  const std::vector<std::pair<std::string, std::string>> short_names = {{"optquant", "optquant:bucket=64"},
                                                                        {"dqsgd", "dqsgd:bucket=64,min=11"},
                                                                        {"rangefloat", "rangefloat:bucket=64"},
                                                                        {"loggrid", "loggrid:bucket=64"},
                                                                        {"unigrid", "unigrid:bucket=64"}};
  for (const auto& [name, spec] : short_names) {
    all.push_back(one(name + "_not_finite", spec, 210, 0.01f, Edit::not_finite));
    all.push_back(one(name + "_extremes", spec, 130, 1e38f, Edit::extremes));
    all.push_back(one(name + "_subnormal", spec, 70, 1e-41f));
    if (name != "dqsgd") all.push_back(one(name + "_full_block_subnormal", name, 1024, 1e-37f));
    all.push_back(one(name + "_zeros", spec, 70, 0.01f, Edit::zeros));
  }
  all.push_back(one("optquant_zeros_first", "optquant:bits=3", 1056, 0.01f, Edit::zeros));
  all.push_back(one("rangefloat_mantissa14_subnormal", "rangefloat:bits=16,mantissa=14", 70, 1e-41f));
  all.push_back(one("rangefloat_max_not_finite", "rangefloat:bucket=64,max=0.01", 210, 0.01f, Edit::not_finite));
  all.push_back(one("unigrid_f16", "unigrid", 300, 0.01f, Edit::none, DType::f16));
}

// Those of structured.cc.
inline void add_structured(std::vector<GoldenCase>& all) {
  for (uint64_t count : {1, 3, 33, 1025, 2500}) all.push_back(one(fmt::format("casq_{}", count), "casq", count));
  for (int bits = 1; bits <= 4; ++bits) {
    all.push_back(one(fmt::format("casq_bits{}", bits), fmt::format("casq:bits={},budget=0.1", bits), 1061));
    all.push_back(one(fmt::format("casq_paper{}", bits), fmt::format("casq:bits={},mode=paper", bits), 1061));
  }
  all.push_back(one("casq_all", "casq:bits=3,budget=1", 200));
  all.push_back(one("casq_odd", "casq:budget=0.05", 300));  // 15 means: half a word is left
  all.push_back(one("casq_paper_1", "casq:mode=paper", 1));
  all.push_back(one("casq_paper_counts", "casq:mode=paper,counts=on,budget=0.1", 600));
  all.push_back(one("casq_fitted", fitted("casq:bits=2", clusters(2, {0, 3, 2, 1})), 1061));
  all.push_back(
      one("casq_fitted_paper",
          fitted("casq:bits=3,mode=paper,budget=0.25", clusters(3, {20000, 1, 0, 500, 600, 7000, 8000, 10000})), 600));
  for (const std::string mode : {"tile", "paper"}) {
    const std::string spec = "casq:mode=" + mode;
    all.push_back(one("casq_" + mode + "_not_finite", spec + (mode == "paper" ? ",counts=on" : ""), 210, 0.01f,
                      Edit::not_finite));
    all.push_back(one("casq_" + mode + "_extremes", spec, 130, 1e38f, Edit::extremes));
    all.push_back(one("casq_" + mode + "_largest", spec, 40, 1.0f, Edit::largest));
    all.push_back(one("casq_" + mode + "_subnormal", spec + ",budget=0.2", 70, 1e-41f));
    all.push_back(one("casq_" + mode + "_zeros", spec, 40, 0.01f, Edit::zeros));
    all.push_back(one("casq_" + mode + "_negative", spec, 100, 0.01f, Edit::negative));
  }
  all.push_back(one("casq_f16", "casq", 300, 0.01f, Edit::none, DType::f16));

  for (uint64_t count : {1, 33, 64, 65, 1025, 2100}) all.push_back(one(fmt::format("fft_{}", count), "fft", count));
  for (int chunk : {256, 512, 2048, 4096})
    all.push_back(one(fmt::format("fft_chunk{}", chunk), fmt::format("fft:chunk={}", chunk),
                      static_cast<uint64_t>(chunk) + (chunk < 2048 ? 141 : 30)));
  for (int bits : {4, 5, 7, 9, 12, 15, 16})
    all.push_back(one(fmt::format("fft_bits{}", bits), fmt::format("fft:chunk=256,bits={}", bits), 300));
  all.push_back(one("fft_float", "fft:format=float,theta=0.5", 1300));
  all.push_back(one("fft_paper", "fft:mode=paper,chunk=256", 600));
  all.push_back(one("fft_all", "fft:theta=0,bits=16,chunk=256", 300));
  all.push_back(one("fft_few", "fft:theta=0.9999,chunk=256", 300));
  all.push_back(one("fft_mantissa", "fft:bits=16,mantissa=1,chunk=256", 300));
  all.push_back(one("fft_fitted", fitted("fft:chunk=256", frequencies(3, 0.6)), 600));
  all.push_back(one("fft_fitted_float", fitted("fft:format=float,mantissa=5", frequencies(5, 0.95)), 300));
  all.push_back(one("fft_not_finite", "fft:chunk=256", 600, 0.01f, Edit::not_finite));
  all.push_back(one("fft_float_not_finite", "fft:chunk=256,format=float", 300, 0.01f, Edit::not_finite));
  all.push_back(one("fft_extremes", "fft:theta=0.5", 130, 1e38f, Edit::extremes));
  all.push_back(one("fft_largest", "fft:theta=0.5", 70, 1.0f, Edit::largest));
  all.push_back(one("fft_subnormal", "fft:theta=0.5", 70, 1e-41f));
  all.push_back(one("fft_zeros", "fft:chunk=256", 300, 0.01f, Edit::zeros));
  all.push_back(one("fft_f16", "fft:chunk=256", 300, 0.01f, Edit::none, DType::f16));
}

inline std::vector<GoldenCase> cases() {
  std::vector<GoldenCase> all;
  for (uint64_t count : {0, 1, 33, 1023, 1024, 1025}) all.push_back(one(fmt::format("qsgd_{}", count), "qsgd", count));
  for (int bits : {2, 3, 5, 6, 7, 8})
    all.push_back(one(fmt::format("qsgd_bits{}", bits), fmt::format("qsgd:bits={}", bits), 1061));
  all.push_back(one("qsgd_bucket64", "qsgd:bucket=64", 1100));
  all.push_back(one("qsgd_bucket128", "qsgd:bits=3,bucket=128", 1100));
  all.push_back(one("qsgd_bucket2048", "qsgd:bucket=2048", 2500));
  all.push_back(one("qsgd_l2", "qsgd:bits=5,norm=l2", 1100));
  all.push_back(one("qsgd_l2_bucket64", "qsgd:bucket=64,norm=l2", 333));
  all.push_back(one("qsgd_nearest", "qsgd:rounding=nearest", 200));
  all.push_back(one("fp32_1", "fp32", 1));
  all.push_back(one("fp32_1025", "fp32", 1025));
  all.push_back(one("fp16_33", "fp16", 33));
  all.push_back(one("fp16_1025", "fp16", 1025));
  all.push_back(one("bf16_33", "bf16", 33));
  all.push_back(one("terngrad_1025", "terngrad", 1025));
  all.push_back(one("terngrad_clip0", "terngrad:clip=0", 200));
  all.push_back(one("terngrad_paper", "terngrad:clip=1.5,mode=paper", 1200));
  all.push_back(one("onebit_1025", "onebit", 1025));
  all.push_back(one("onebit_paper", "onebit:mode=paper", 500));
  all.push_back(one("topk_0", "topk", 0));
  all.push_back(one("topk_1200", "topk", 1200));
  all.push_back(one("topk_ratio0.5", "topk:ratio=0.5", 33));
  all.push_back(one("topk_ratio0.07", "topk:ratio=0.07", 100));
  all.push_back(one("topk_all", "topk:ratio=1", 70));
  all.push_back(one("topk_paper", "topk:ratio=0.02,mode=paper", 300));
  all.push_back(one("topk_ties", "topk:ratio=0.1", 700, 0.01f, Edit::ties));
  add_packed(all);

  // Not-a-number units, and values at the ends of the range.
  for (const char* spec : {"fp32", "fp16", "bf16", "qsgd:bucket=64", "qsgd:bits=8", "terngrad", "onebit", "topk"}) {
    std::string name = spec;
    for (char& c : name)
      if (c == ':' || c == '=') c = '_';
    all.push_back(one(name + "_not_finite", spec, 210, 0.01f, Edit::not_finite));
  }
  for (const char* spec : {"fp16", "bf16"}) all.push_back(one(std::string(spec) + "_overflow", spec, 40, 3.4e38f));
  for (int bits : {4, 6, 8})
    all.push_back(one(fmt::format("qsgd_bits{}_extremes", bits), fmt::format("qsgd:bits={},bucket=64", bits), 130,
                      1e38f, Edit::extremes));
  all.push_back(one("qsgd_l2_extremes", "qsgd:norm=l2", 130, 1e38f, Edit::extremes));
  all.push_back(one("terngrad_extremes", "terngrad", 130, 1e38f, Edit::extremes));
  all.push_back(one("onebit_extremes", "onebit", 130, 1e38f, Edit::extremes));
  for (const char* codec : {"fp32", "fp16", "bf16", "qsgd", "terngrad", "onebit", "topk"})
    all.push_back(one(std::string(codec) + "_subnormal", codec, 70, 1e-41f));
  all.push_back(one("qsgd_full_block_subnormal", "qsgd:bits=2", 1024, 1e-37f));
  all.push_back(one("qsgd_zeros", "qsgd:bits=3", 1056, 0.01f, Edit::zeros));
  all.push_back(one("onebit_zeros", "onebit", 40, 0.01f, Edit::zeros));
  all.push_back(one("onebit_negative", "onebit", 40, 0.01f, Edit::negative));
  all.push_back(one("qsgd_f16", "qsgd", 300, 0.01f, Edit::none, DType::f16));
  all.push_back(one("qsgd_bf16", "qsgd", 300, 0.01f, Edit::none, DType::bf16));
  all.push_back(one("topk_f16", "topk:ratio=0.1", 300, 0.01f, Edit::none, DType::f16));

  // The examples of docs/wire-format.md stand there in full; here are messages of several tensors.
  const auto tensor = [](const std::string& name, uint64_t count, const std::string& spec, uint64_t first = 0,
                         DType dtype = DType::f32) {
    return Tensor{{name, count, dtype, Codec::parse(spec), first}, count + 77};
  };
  all.push_back({"empty", {}, {.seed = 3, .step = 1, .stage = 2, .rank = 3, .world = 4}});
  all.push_back(
      {"mixed",
       {tensor("layer1.weight", 1030, "qsgd:bits=4"), tensor("layer1.bias", 10, "fp32"), tensor("none", 0, "onebit"),
        tensor("layer2.weight", 1024, "onebit"), tensor("layer2.bias", 7, "fp32", 0, DType::bf16),
        tensor("größe", 65, "topk:ratio=0.1"), tensor("", 3, "bf16", 0, DType::f16), tensor("last", 65, "qsgd:bits=4")},
       {.seed = 42, .step = 123456789012, .stage = 1, .rank = 2, .world = 5}});
  all.push_back({"piece",
                 {tensor("embedding", 1500, "qsgd:bits=4", 32768), tensor("embedding", 40, "terngrad", 65536)},
                 {.seed = 9, .step = 3, .stage = 0, .rank = 1, .world = 2}});

  add_methods(all);
  add_structured(all);
  // Specs that differ in their tables alone; regions that are empty or need not be aligned.
  const auto with = [](const std::string& name, uint64_t count, const Codec& codec, uint64_t first = 0) {
    return Tensor{{name, count, DType::f32, codec, first}, count + 77};
  };
  all.push_back({"mixed_tables",
                 {with("a", 40, fitted("optquant:bits=3", levels(7))), with("b", 1030, Codec::parse("optquant:bits=3")),
                  with("c", 41, fitted("optquant:bits=3", levels(8))),
                  with("d", 42, fitted("optquant:bits=3", levels(7))), with("e", 2048, fitted("dqsgd", {0})),
                  with("f", 7, Codec::parse("rangefloat")), with("g", 1100, Codec::parse("fft")),
                  with("h", 1024, Codec::parse("casq")), with("i", 5, Codec::parse("loggrid")),
                  with("j", 3, fitted("dqsgd", {0})), with("k", 1500, fitted("dqsgd", {0}))},
                 {.seed = 5, .step = 11, .stage = 1, .rank = 0, .world = 3}});
  all.push_back({"piece_methods",
                 {with("embedding", 1100, Codec::parse("optquant"), 32768),
                  with("embedding", 300, Codec::parse("casq:mode=paper"), 65536),
                  with("embedding", 300, Codec::parse("fft:chunk=256"), 98304),
                  with("embedding", 40, Codec::parse("casq"), uint64_t{1} << 40)},
                 {.seed = 9, .step = 3, .stage = 0, .rank = 1, .world = 2}});

  // Shapes: none, of one dimension, of the most dimensions, and of no elements.
  const auto shaped = [](const std::string& name, const std::string& spec, std::vector<uint64_t> shape) {
    Tensor t{{name, 1, DType::f32, Codec::parse(spec)}, 91};
    for (const uint64_t extent : shape) t.spec.count *= extent;
    t.spec.shape = std::move(shape);
    return t;
  };
  all.push_back(
      {"shapes",
       {shaped("a", "qsgd", {3, 5, 7}), tensor("b", 11, "fp32"), shaped("c", "fp32", {1, 2, 1, 3, 1, 1, 2, 2}),
        shaped("d", "qsgd", {0, uint64_t{1} << 40}), shaped("e", "topk", {1}), shaped("f", "fp32", {32, 40})}});
  // Codecs that differ in how they learn alone have one spec in a message.
  all.push_back(
      {"learning",
       {with("a", 40, Codec::parse("optquant:bits=3,workers=8,refit=7")),
        with("b", 41, Codec::parse("optquant:bits=3,refit=0")),
        with("c", 42, Codec::parse("dqsgd:error=0.5,rule=convex,steps=100,alpha=0.5,eta=2,smooth=3,mode=paper")),
        with("d", 43, Codec::parse("casq:rule=entropy,cut=0.95,start=500,refit=1")),
        with("e", 44, Codec::parse("fft:schedule=rate,smooth=2,until=9,refit=2")),
        with("f", 45, Codec::parse("rangefloat:refit=3"))}});

  const std::vector<GoldenCase> large = {
      one("large_onebit", "onebit", 40000),
      one("large_onebit_paper", "onebit:mode=paper", 40000),
      one("large_terngrad", "terngrad", 40000),
      one("large_terngrad_paper", "terngrad:mode=paper", 40000),
      one("large_topk", "topk", 40000),
      one("large_topk_paper", "topk:ratio=0.001,mode=paper", 70000),  // above 65536: indices of 32 bits
      one("large_topk_bits2", "topk:ratio=0.015625,bits=2", 40000),
      one("large_topk_bits6", "topk:ratio=0.3,bits=6,index=bitmap", 33000),
      one("large_qsgd", "qsgd:bits=2,bucket=32768", 40000),
      one("large_optquant", "optquant:bits=2,bucket=32768", 40000),
      one("large_loggrid_tensor", "loggrid:k=0,scale=tensor", 40000),
      one("large_casq", "casq:bits=1,budget=0.01", 40000),
      one("large_casq_bits3", "casq:bits=3,budget=0.02", 33000),
      one("large_casq_paper", "casq:bits=1,mode=paper,budget=0.002,counts=on", 70000),
  };
  for (const GoldenCase& c : large) {
    all.push_back(c);
    all.back().large = true;
  }
  return all;
}

inline float round_to(float x, DType dtype) {
  if (dtype == DType::f16) return f16_to_f32(f32_to_f16(x));
  if (dtype == DType::bf16) return bf16_to_f32(f32_to_bf16(x));
  return x;
}

inline std::vector<float> input(const Tensor& t) {
  std::vector<float> values(t.spec.count);
  uint64_t state = t.seed;
  for (uint64_t i = 0; i < values.size(); ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const float u = static_cast<float>(static_cast<int32_t>(state >> 40) - (1 << 23)) * 0x1p-23f;
    float& x = values[i];
    x = u * u * u * t.scale;
    const float largest = std::numeric_limits<float>::max();
    if (t.edit == Edit::extremes) x = i % 7 == 0 ? largest : i % 11 == 0 ? -largest : i % 13 == 0 ? -0.0f : x;
    if (t.edit == Edit::ties) x = u < -0.8f ? -2.0f : u < 0.0f ? 0.5f : u < 0.5f ? -0.5f : 0.25f;
    if (t.edit == Edit::zeros && i < 1024) x = i % 2 ? -0.0f : 0.0f;
    if (t.edit == Edit::negative) x = x > 0 ? -x : x;
    if (t.edit == Edit::largest) x = i % 3 == 2 ? -largest : largest;
    if (t.edit == Edit::not_finite) {
      const float inf = std::numeric_limits<float>::infinity();
      x = i == 5 ? bits_float(0xffc12345u) : i == 70 ? largest : i == 100 ? inf : i == 200 ? -inf : x;
    }
    x = round_to(x, t.spec.dtype);
  }
  return values;
}

inline std::vector<TensorSpec> specs(const GoldenCase& c) {
  std::vector<TensorSpec> out;
  for (const Tensor& t : c.tensors) out.push_back(t.spec);
  return out;
}

inline std::vector<float> inputs(const GoldenCase& c) {  // all tensors, one after another
  std::vector<float> out;
  for (const Tensor& t : c.tensors)
    for (float x : input(t)) out.push_back(x);
  return out;
}

inline std::vector<std::byte> encode(const GoldenCase& c, const Plan& plan, const Device& device) {
  std::vector<std::vector<float>> f32;
  std::vector<std::vector<uint16_t>> halves;
  std::vector<const void*> pointers;
  for (const Tensor& t : c.tensors) {
    f32.push_back(input(t));
    halves.emplace_back();
    for (float x : f32.back()) {
      if (t.spec.dtype == DType::f16) halves.back().push_back(f32_to_f16(x));
      if (t.spec.dtype == DType::bf16) halves.back().push_back(f32_to_bf16(x));
    }
    pointers.push_back(t.spec.dtype == DType::f32 ? static_cast<const void*>(f32.back().data()) : halves.back().data());
  }
  std::vector<std::byte> message(plan.message_bytes());
  make_runner(plan, device)->encode(pointers, c.stamp, message);
  return message;
}

// Decodes to f32, whatever type the sender had.
inline std::vector<float> decode(std::span<const std::byte> message, std::vector<TensorSpec> tensors,
                                 const Device& device) {
  size_t count = 0;
  for (TensorSpec& t : tensors) {
    t.dtype = DType::f32;
    count += t.count;
  }
  std::vector<float> out(count);
  std::vector<void*> pointers;
  size_t at = 0;
  for (const TensorSpec& t : tensors) {
    pointers.push_back(out.data() + at);
    at += t.count;
  }
  const Plan plan(tensors);
  make_runner(plan, device)->decode(message, pointers);
  return out;
}

template <class T>
uint64_t hash(const std::vector<T>& values) {
  return XXH64(values.data(), values.size() * sizeof(T), 0);
}

inline std::string manifest(const std::vector<GoldenCase>& all) {
  std::string text = fmt::format("{{\n\"wire_format\": {},\n", kWireVersion);
  for (const bool large : {false, true}) {
    text += fmt::format("\"{}\": [", large ? "large" : "frames");
    const char* comma = "";
    for (const GoldenCase& c : all) {
      if (c.large != large) continue;
      const Plan plan(specs(c));
      const std::vector<std::byte> message = encode(c, plan, {});
      text += fmt::format(
          "{}\n {{\"name\": \"{}\", \"seed\": {}, \"step\": {}, \"stage\": {}, \"rank\": {}, \"world\": {},\n  "
          "\"message_xxh64\": \"{:016x}\", "
          "\"input_xxh64\": \"{:016x}\", \"decoded_xxh64\": \"{:016x}\",\n  \"tensors\": [",
          comma, c.name, c.stamp.seed, c.stamp.step, c.stamp.stage, c.stamp.rank, c.stamp.world, hash(message),
          hash(inputs(c)), hash(decode(message, specs(c), {})));
      comma = ",";
      const char* inner = "";
      for (const Tensor& t : c.tensors) {
        text += fmt::format(
            "{}\n   {{\"name\": \"{}\", \"spec\": \"{}\", \"count\": {}, \"first\": {}, \"dtype\": \"{}\"", inner,
            t.spec.name, t.spec.codec.wire_spec(), t.spec.count, t.spec.first, name_of(t.spec.dtype));
        if (!t.spec.shape.empty()) text += fmt::format(", \"shape\": [{}]", fmt::join(t.spec.shape, ", "));
        if (large) text += fmt::format(", \"input_seed\": {}, \"input_scale\": {}", t.seed, t.scale);
        text += "}";
        inner = ",";
      }
      text += "]}";
    }
    text += large ? "\n]\n" : "\n],\n";
  }
  return text + "}\n";
}

}  // namespace golden
