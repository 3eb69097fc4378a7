// SPDX-License-Identifier: Apache-2.0
// The arrays of a MomentumOptimizer (optim/momentum.h) as tensors on the worker's device, one of each per parameter.
#pragma once

#include <torch/types.h>

#include <vector>

#include "core/check.h"
#include "optim/momentum.h"
#include "train/optimizer.h"

namespace gradwire::train {

struct MomentumTensors {
  using List = std::vector<torch::Tensor>;

  List weights, values;        // values: what is sent, and the mean that comes back
  List first, second;          // alike on all workers
  List own_first, own_second;  // this worker's

  // With moments of zero. SGD has only the first.
  MomentumTensors(List parameters, List sent, bool adaptive)
      : weights(std::move(parameters)), values(std::move(sent)), first(zeros_like(weights)) {
    if (!adaptive) return;
    second = zeros_like(weights);
    own_first = zeros_like(weights);
    own_second = zeros_like(weights);
  }

  std::vector<MomentumOptimizer::Arrays> arrays() const {
    const auto at = [](const List& list, size_t i) { return list.empty() ? nullptr : list[i].data_ptr<float>(); };
    std::vector<MomentumOptimizer::Arrays> list;
    for (size_t i = 0; i < weights.size(); ++i) {
      GW_CHECK(weights[i].is_contiguous() && weights[i].scalar_type() == torch::kFloat32);
      list.push_back({.weights = at(weights, i),
                      .values = at(values, i),
                      .first = at(first, i),
                      .second = at(second, i),
                      .own_first = at(own_first, i),
                      .own_second = at(own_second, i),
                      .count = static_cast<uint64_t>(weights[i].numel())});
    }
    return list;
  }
};

}  // namespace gradwire::train
