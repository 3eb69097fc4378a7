// SPDX-License-Identifier: Apache-2.0
// A worker of an optimizer that exchanges momenta, with its arrays on the host, and a step of several workers with an
// exact exchange.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "optim/momentum.h"
#include "optim/normal_values.h"

namespace gradwire::test {

// One parameter. A copy is only for comparison: its optimizer works on the arrays of the original.
struct MomentumWorker {
  MomentumWorker(uint64_t count, uint64_t seed, const MomentumOptions& options, const Device& device = {})
      : weights(normal_values(count, seed, 1)),
        values(count),
        first(count),
        second(count),
        own_first(count),
        own_second(count) {
    optimizer =
        std::make_shared<MomentumOptimizer>(std::vector<MomentumOptimizer::Arrays>{{.weights = weights.data(),
                                                                                    .values = values.data(),
                                                                                    .first = first.data(),
                                                                                    .second = second.data(),
                                                                                    .own_first = own_first.data(),
                                                                                    .own_second = own_second.data(),
                                                                                    .count = count}},
                                            options, device);
  }
  MomentumWorker(const MomentumWorker&) = default;
  MomentumWorker(MomentumWorker&&) = default;  // vectors keep their memory when they are moved

  std::vector<float> weights, values, first, second, own_first, own_second;
  std::shared_ptr<MomentumOptimizer> optimizer;
};

// The mean of one array over all workers, in all of them.
inline void average(std::vector<MomentumWorker>& workers, std::vector<float> MomentumWorker::*from,
                    std::vector<float> MomentumWorker::*to) {
  std::vector<float> mean((workers[0].*from).size());
  for (const MomentumWorker& one : workers)
    for (size_t i = 0; i < mean.size(); ++i) mean[i] += (one.*from)[i];
  for (float& value : mean) value /= static_cast<float>(workers.size());
  for (MomentumWorker& one : workers) std::copy(mean.begin(), mean.end(), (one.*to).begin());
}

inline void step_together(std::vector<MomentumWorker>& workers, const std::vector<std::vector<float>>& gradients,
                          double factor, double rate) {
  const std::vector<size_t> all{0};
  const bool exact = workers[0].optimizer->exact();
  for (size_t r = 0; r < workers.size(); ++r) {
    const std::vector<const float*> own{gradients[r].data()};
    if (exact)
      std::copy(gradients[r].begin(), gradients[r].end(), workers[r].values.begin());
    else
      workers[r].optimizer->propose(all, own, factor);
  }
  average(workers, &MomentumWorker::values, &MomentumWorker::values);
  for (size_t r = 0; r < workers.size(); ++r) {
    const std::vector<const float*> own{gradients[r].data()};
    MomentumOptimizer& optimizer = *workers[r].optimizer;
    if (exact) {
      optimizer.exact_step(own, factor, rate, factor);
    } else {
      optimizer.to_momenta();
      optimizer.step(own, factor, rate, 1);
    }
  }
  if (!workers[0].optimizer->pools()) return;
  average(workers, &MomentumWorker::own_second, &MomentumWorker::second);
  for (MomentumWorker& one : workers) {
    MomentumOptimizer::lift(one.second);
    one.optimizer->pooled();
  }
}

}  // namespace gradwire::test
