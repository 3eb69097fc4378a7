// SPDX-License-Identifier: Apache-2.0
// Half the squared distance to a target, with gradient noise: what workers descend in tests of codecs that learn. The
// noise is a function of (seed, worker, step, element), so the same descent can be repeated over a server, over a
// Reducer and without compression. The problem is linear, so the difference from the descent without compression is
// what compression has done, and nothing else.
#pragma once

#include <array>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "core/bits.h"
#include "server/signature.h"

namespace gradwire::server {

class NoisyQuadratic {
 public:
  enum class Profile { normal, sparse, layered };
  using Tensors = std::vector<std::vector<float>>;
  static constexpr size_t kTensors = 2, kElements = 4096;  // of a tensor
  static constexpr float kRate = 0.5f;

  NoisyQuadratic(Profile profile, uint64_t seed) : seed_(mix64(seed)) {
    // The quantiles of a normal distribution, by the sum of twelve uniform ones: no library differs in it.
    uint64_t draws = 1;
    for (float& one : normal_) {
      double sum = -6;
      for (int i = 0; i < 12; ++i) sum += static_cast<double>(mix64(++draws) >> 40) * 0x1p-24;
      one = static_cast<float>(sum);
    }
    for (size_t i = 0; i < kTensors; ++i)
      for (size_t k = 0; k < kElements; ++k) scale_[i].push_back(scale_of(profile, i, k));
  }

  static Signature signature(const std::string& up, const std::string& down = "fp32") {
    Signature signature;
    for (size_t i = 0; i < kTensors; ++i)
      signature.parameters.push_back({"layer" + std::to_string(i), {static_cast<int64_t>(kElements / 64), 64}});
    signature.up = up;
    signature.down = down;
    return signature;
  }
  static Tensors zeros() { return Tensors(kTensors, std::vector<float>(kElements)); }

  // The update of one worker: the rate times its gradient.
  void update(uint64_t worker, uint64_t step, const Tensors& at, Tensors& to) const {
    for (size_t i = 0; i < kTensors; ++i) {
      const uint64_t draw = mix64(seed_ ^ mix64(worker * kTensors + i + 1) ^ step << 20);
      for (size_t k = 0; k < kElements; ++k) to[i][k] = kRate * (at[i][k] - target(i, k) + noise(draw, i, k));
    }
  }
  // A step without compression, of these workers.
  void exact_step(std::span<const uint64_t> workers, uint64_t step, std::vector<std::vector<double>>& x) const {
    for (size_t i = 0; i < kTensors; ++i) {
      std::vector<double> sum(kElements);
      for (uint64_t worker : workers) {
        const uint64_t draw = mix64(seed_ ^ mix64(worker * kTensors + i + 1) ^ step << 20);
        for (size_t k = 0; k < kElements; ++k) sum[k] += static_cast<double>(noise(draw, i, k));
      }
      for (size_t k = 0; k < kElements; ++k)
        x[i][k] -= kRate * (x[i][k] - target(i, k) + sum[k] / static_cast<double>(workers.size()));
    }
  }
  static double squared_distance(const Tensors& a, const std::vector<std::vector<double>>& b) {
    double sum = 0;
    for (size_t i = 0; i < kTensors; ++i)
      for (size_t k = 0; k < kElements; ++k) sum += (a[i][k] - b[i][k]) * (a[i][k] - b[i][k]);
    return sum / static_cast<double>(kTensors * kElements);
  }

 private:
  static float target(size_t i, size_t k) { return static_cast<float>((i * 100 + k) * 37 % 401) * 0.005f - 1.0f; }
  static float scale_of(Profile profile, size_t tensor, size_t k) {
    const uint64_t draw = mix64(tensor * kElements + k + 77);
    if (profile == Profile::sparse) return draw % 32 == 0 ? 1.0f : 0.03f;
    if (profile == Profile::layered) return (tensor == 0 ? 1.0f : 0.02f) * (draw % 4 == 0 ? 0.1f : 1.0f);
    return 1.0f;
  }
  float noise(uint64_t draw, size_t tensor, size_t k) const {
    return scale_[tensor][k] * normal_[mix64(draw + k) >> 52];
  }

  uint64_t seed_;
  std::array<float, 4096> normal_;
  std::array<std::vector<float>, kTensors> scale_;
};

}  // namespace gradwire::server
