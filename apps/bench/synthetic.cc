// SPDX-License-Identifier: Apache-2.0
// Synthetic gradients: see synthetic.h. One 64-bit hash makes one element: four 14-bit fields add up to a bell curve
// (the sum of four uniform numbers, close to a Gaussian), the last 8 bits choose a factor. Half of the factors are 1,
// half are sqrt(E) with E exponential, which turns the Gaussian into a Laplace variable of the same variance.
#include "bench/synthetic.h"

#include <array>
#include <cmath>

#include "bench/measure.h"
#include "core/check.h"

namespace gradwire::app {
namespace {

uint64_t mix(uint64_t z) {  // the finaliser of splitmix64
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

class GradientSource {
 public:
  GradientSource() {
    for (size_t i = 0; i < 128; ++i) {
      factor_[i] = kUnit;
      factor_[128 + i] = kUnit * static_cast<float>(std::sqrt(-std::log((static_cast<double>(i) + 0.5) / 128)));
    }
  }
  float operator()(uint64_t stream, uint64_t index) const {
    const uint64_t h = mix(stream + (index + 1) * 0x9e3779b97f4a7c15ull);
    const int32_t sum =
        static_cast<int32_t>((h & 0x3fff) + (h >> 14 & 0x3fff) + (h >> 28 & 0x3fff) + (h >> 42 & 0x3fff));
    return (static_cast<float>(sum) - 2.0f * 16383.0f) * factor_[h >> 56];
  }

 private:
  static constexpr float kUnit = 1.7320508f / 16384.0f;  // the sum of four has standard deviation 16384 / sqrt(3)
  std::array<float, 256> factor_;
};

const GradientSource& source() {
  static const GradientSource instance;
  return instance;
}

}  // namespace

void fill_gradient(std::span<float> values, uint64_t stream, int threads) {
  const GradientSource& value = source();
  const uint64_t key = mix(stream + 1);
  ThreadTeam team(threads);
  team.run([&](int i) {
    const ThreadShare share = share_of(values.size(), i, threads);
    for (uint64_t at = share.begin; at < share.end; ++at) {
      // Blocks of 4096 elements differ by up to 16 in scale, as rows of a real gradient do.
      const float scale = 0.25e-3f * static_cast<float>(1u << (mix(key ^ at >> 12) & 3));
      values[at] = scale * value(key, at);
    }
  });
}

std::vector<float> worker_gradients(const std::vector<NamedTensor>& tensors, int rank, uint64_t seed) {
  const GradientSource& value = source();
  uint64_t total = 0;
  for (const NamedTensor& tensor : tensors) total += tensor.count;
  std::vector<float> gradients(total);
  float* out = gradients.data();
  for (const NamedTensor& tensor : tensors) {
    const uint64_t common = mix(seed ^ hash_name(tensor.name));
    const uint64_t own = mix(common + static_cast<uint64_t>(rank) + 1);
    const float scale = 1e-4f * std::pow(10.0f, 3.0f * static_cast<float>(common & 0xff) / 255.0f);
    for (uint64_t i = 0; i < tensor.count; ++i) *out++ = scale * (value(common, i) + value(own, i));
  }
  return gradients;
}

double squared_relative_error(std::span<const float> exact, std::span<const float> approximate) {
  GW_CHECK(exact.size() == approximate.size());
  double error = 0, size = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double difference = static_cast<double>(exact[i]) - approximate[i];
    error += difference * difference;
    size += static_cast<double>(exact[i]) * exact[i];
  }
  return error == 0 ? 0 : error / size;
}

}  // namespace gradwire::app
