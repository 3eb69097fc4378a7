// SPDX-License-Identifier: Apache-2.0
// What the tests of two levels share: nodes of several ranks, and what a node gives as a whole.
#pragma once

#include <string>
#include <vector>

#include "collective/collective_fixture.h"

namespace gradwire::test {

struct TestLayout {
  int nodes, per_node;
  int world() const { return nodes * per_node; }
  std::string str() const { return std::to_string(nodes) + "x" + std::to_string(per_node); }
};
inline const std::vector<TestLayout> kLayouts = lighter<std::vector<TestLayout>>({{2, 2}, {2, 4}, {3, 2}}, {{2, 2}});

inline const std::vector<NamedTensor> kTwoLevelModel{{"embed", lighter(100'003, 35'003), DType::f32, 2},
                                                     {"a.weight", lighter(40'000, 4'000), DType::f32, 2},
                                                     {"a.bias", 17, DType::f32, 1},
                                                     {"b.weight", lighter(32'769, 4'097), DType::f16, 2},
                                                     {"c.weight", 5'000, DType::bf16, 2},
                                                     {"none", 0, DType::f32, 2},
                                                     {"d.bias", 1, DType::f32, 1}};

inline std::vector<int> consecutive(const TestLayout& layout) {
  std::vector<int> nodes;
  for (int r = 0; r < layout.world(); ++r) nodes.push_back(r / layout.per_node);
  return nodes;
}

// The mean of a node's gradients as the promise says it: added in the order of the places, in f32, and divided.
inline TensorValues node_mean(const std::vector<NamedTensor>& tensors, const TestLayout& layout, int node,
                              uint64_t step) {
  std::vector<NamedTensor> wide = tensors;
  for (NamedTensor& tensor : wide) tensor.dtype = DType::f32;
  TensorValues mean(wide);
  mean.fill([](size_t, uint64_t) { return 0.0f; });
  for (int place = 0; place < layout.per_node; ++place) {
    const TensorValues one = gradients(tensors, node * layout.per_node + place, step);
    mean.fill([&](size_t t, uint64_t i) { return mean.get(t, i) + one.get(t, i); });
  }
  mean.fill([&](size_t t, uint64_t i) { return mean.get(t, i) / static_cast<float>(layout.per_node); });
  return mean;
}

}  // namespace gradwire::test
