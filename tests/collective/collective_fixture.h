// SPDX-License-Identifier: Apache-2.0
// What the tests of the collectives share: ranks as threads over the loopback engine, tensors with known values, and
// what each rank said when it failed.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/bits.h"
#include "engine/outcome.h"
#include "gradwire/collective.h"
#include "gradwire/error.h"
#include "support/lighter.h"

namespace gradwire::test {

using Method = ReduceOptions::Method;
using Op = ReduceOptions::Op;
using Feedback = ReduceOptions::Feedback;
using Commit = ReduceOptions::Commit;

inline const int kWorlds[] = {1, 2, 3, 4, 7};
inline const Method kMethods[] = {Method::gather, Method::scatter};

inline const char* name_of(Method method) { return method == Method::gather ? "gather" : "scatter"; }

// Every codec. Under ThreadSanitizer, where a fit takes a minute, those that differ in what threads do: one that learns
// among them.
inline std::vector<std::string> all_specs() {
  if (kThreadSanitizer) return {"fp32", "qsgd", "topk", "dqsgd"};
  std::vector<std::string> specs;
  for (const CodecInfo& info : codecs()) specs.push_back(info.name);
  return specs;
}

// The bytes of a list of tensors, each in its own type.
struct TensorValues {
  explicit TensorValues(const std::vector<NamedTensor>& list) : tensors(list) {
    for (const NamedTensor& t : list) bytes.emplace_back(t.count * bytes_of(t.dtype), std::byte{0xcd});
  }
  float get(size_t t, uint64_t i) const {
    if (tensors[t].dtype == DType::f32) return reinterpret_cast<const float*>(bytes[t].data())[i];
    const uint16_t h = reinterpret_cast<const uint16_t*>(bytes[t].data())[i];
    return tensors[t].dtype == DType::f16 ? f16_to_f32(h) : bf16_to_f32(h);
  }
  void set(size_t t, uint64_t i, float x) {
    if (tensors[t].dtype == DType::f32)
      reinterpret_cast<float*>(bytes[t].data())[i] = x;
    else
      reinterpret_cast<uint16_t*>(bytes[t].data())[i] = tensors[t].dtype == DType::f16 ? f32_to_f16(x) : f32_to_bf16(x);
  }
  void fill(const std::function<float(size_t, uint64_t)>& value) {
    for (size_t t = 0; t < tensors.size(); ++t)
      for (uint64_t i = 0; i < tensors[t].count; ++i) set(t, i, value(t, i));
  }
  std::vector<const void*> in() const {
    std::vector<const void*> pointers;
    for (const auto& b : bytes) pointers.push_back(b.data());
    return pointers;
  }
  std::vector<void*> out() {
    std::vector<void*> pointers;
    for (auto& b : bytes) pointers.push_back(b.data());
    return pointers;
  }
  friend bool operator==(const TensorValues& a, const TensorValues& b) { return a.bytes == b.bytes; }

  std::vector<NamedTensor> tensors;
  std::vector<std::vector<std::byte>> bytes;
};

// Gradients of a rank at a step: sums of four uniform numbers, with standard deviation 0.01 and magnitude below 0.035.
// They hang on the tensor's name, not on its place in the list: regrouped lists have the same values.
inline TensorValues gradients(const std::vector<NamedTensor>& tensors, int rank, uint64_t step) {
  TensorValues data(tensors);
  for (size_t t = 0; t < tensors.size(); ++t) {
    const uint64_t key = mix64(hash_name(tensors[t].name) + mix64(step * 1000 + static_cast<uint64_t>(rank) + 1));
    for (uint64_t i = 0; i < tensors[t].count; ++i) {
      const uint64_t bits = mix64(key + i * 0x9e3779b97f4a7c15ull);
      const auto sum = static_cast<int>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
      data.set(t, i, static_cast<float>(sum - 2 * 65535) * (0.01f / 37837.0f));
    }
  }
  return data;
}

// Runs body(engine) on a thread per rank; engines live until all have ended.
inline std::vector<Outcome> outcomes(int world, const std::function<void(Engine&)>& body) {
  auto engines = make_loopback(world);
  std::vector<Outcome> results(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (size_t r = 0; r < results.size(); ++r)
    threads.emplace_back([&, r] { results[r] = outcome_of([&] { body(*engines[r]); }); });
  for (std::thread& thread : threads) thread.join();
  return results;
}

// One value per rank, written by the ranks' own threads (so no bool: those would share a byte).
template <class T>
struct PerRank {
  explicit PerRank(int world) : values(static_cast<size_t>(world)) {}
  T& operator[](int rank) { return values[static_cast<size_t>(rank)]; }
  T& of(const Engine& engine) { return values[static_cast<size_t>(engine.rank())]; }
  std::vector<T> values;
};

// All ranks' results of one reduction of `inputs(rank)`.
inline std::vector<TensorValues> reduce(int world, const std::vector<NamedTensor>& tensors,
                                        const ReduceOptions& options,
                                        const std::function<TensorValues(int rank)>& inputs, uint64_t step = 3) {
  std::vector<TensorValues> results(static_cast<size_t>(world), TensorValues(tensors));
  run_loopback(world, [&](Engine& engine) {
    Reducer reducer(engine, tensors, options);
    const TensorValues in = inputs(engine.rank());
    TensorValues& out = results[static_cast<size_t>(engine.rank())];
    reducer.run(step, in.in(), out.out());
  });
  return results;
}

inline void expect_identical(const std::vector<TensorValues>& ranks, const std::string& what) {
  for (size_t r = 1; r < ranks.size(); ++r)
    EXPECT_TRUE(ranks[r] == ranks[0]) << what << ": rank " << r << " differs from 0";
}

// ResNet-50's parameters, by name and shape: 161 tensors, 25.6 million elements.
inline std::vector<NamedTensor> resnet50() {
  std::vector<NamedTensor> list;
  const auto conv = [&](const std::string& name, uint64_t out, uint64_t in, uint64_t k) {
    list.push_back({name + ".weight", out * in * k * k, DType::f32, 4});
  };
  const auto norm = [&](const std::string& name, uint64_t n) {
    list.push_back({name + ".weight", n, DType::f32, 1});
    list.push_back({name + ".bias", n, DType::f32, 1});
  };
  conv("conv1", 64, 3, 7);
  norm("bn1", 64);
  const int blocks[] = {3, 4, 6, 3};
  uint64_t in = 64;
  for (int layer = 0; layer < 4; ++layer)
    for (int block = 0; block < blocks[layer]; ++block) {
      const uint64_t width = uint64_t{64} << layer;
      const std::string at = "layer" + std::to_string(layer + 1) + "." + std::to_string(block) + ".";
      conv(at + "conv1", width, in, 1);
      norm(at + "bn1", width);
      conv(at + "conv2", width, width, 3);
      norm(at + "bn2", width);
      conv(at + "conv3", 4 * width, width, 1);
      norm(at + "bn3", 4 * width);
      if (block == 0) {
        conv(at + "downsample.0", 4 * width, in, 1);
        norm(at + "downsample.1", 4 * width);
      }
      in = 4 * width;
    }
  list.push_back({"fc.weight", 2048 * 1000, DType::f32, 2});
  list.push_back({"fc.bias", 1000, DType::f32, 1});
  return list;
}

}  // namespace gradwire::test
