// SPDX-License-Identifier: Apache-2.0
// What compression does to a descent of the noisy quadratic in a closed loop, and the same descent over a Reducer: what
// a server has to be as good as.
#pragma once

#include <functional>
#include <vector>

#include "server/noisy_quadratic.h"
#include "server/reducer_descent.h"

namespace gradwire::server {

inline constexpr uint64_t kLoopSteps = 1200, kLast = 300;

// What compression has done to the weights, in the mean square over the last steps.
class Excess {
 public:
  explicit Excess(const NoisyQuadratic& problem)
      : problem_(problem), exact_(NoisyQuadratic::kTensors, std::vector<double>(NoisyQuadratic::kElements)) {}
  std::vector<uint64_t> workers = {0, 1, 2, 3};
  void see(uint64_t step, const NoisyQuadratic::Tensors& weights) {
    problem_.exact_step(workers, step - 1, exact_);
    if (step > kLoopSteps - kLast) sum_ += NoisyQuadratic::squared_distance(weights, exact_) / kLast;
  }
  double mean() const { return sum_; }

 private:
  const NoisyQuadratic& problem_;
  std::vector<std::vector<double>> exact_;
  double sum_ = 0;
};

inline void descend_over_reducer(const NoisyQuadratic& problem, const Signature& signature, int world, uint64_t steps,
                                 const std::function<void(uint64_t step, const NoisyQuadratic::Tensors&)>& seen) {
  descend_over_reducer(
      signature, world, steps,
      [&](uint64_t rank, uint64_t step, const NoisyQuadratic::Tensors& weights, NoisyQuadratic::Tensors& to) {
        problem.update(rank, step, weights, to);
      },
      seen);
}

inline double excess_over_reducer(const NoisyQuadratic& problem, const Signature& signature) {
  Excess excess(problem);
  descend_over_reducer(problem, signature, 4, kLoopSteps,
                       [&](uint64_t step, const NoisyQuadratic::Tensors& weights) { excess.see(step, weights); });
  return excess.mean();
}

}  // namespace gradwire::server
