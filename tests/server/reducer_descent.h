// SPDX-License-Identifier: Apache-2.0
// The descent that workers make over a server, made over an engine instead: what a server has to be as good as.
#pragma once

#include <functional>
#include <vector>

#include "gradwire/collective.h"
#include "server/signature.h"

namespace gradwire::server {

using DescentTensors = std::vector<std::vector<float>>;

// From weights of zero, in every step the mean of the ranks' updates is subtracted. `update` writes what a rank sends;
// `seen` is called by rank 0 with the weights after a step.
inline void descend_over_reducer(
    const Signature& signature, int world, uint64_t steps,
    const std::function<void(uint64_t rank, uint64_t step, const DescentTensors& weights, DescentTensors& to)>& update,
    const std::function<void(uint64_t step, const DescentTensors& weights)>& seen) {
  run_loopback(world, [&](Engine& engine) {
    ReduceOptions options;
    options.method = ReduceOptions::Method::gather;
    options.up = signature.up;
    options.steps = steps;
    options.feedback = signature.feedback;
    std::vector<NamedTensor> tensors;
    DescentTensors weights;
    for (const Variable& one : signature.parameters) {
      tensors.push_back({one.name, one.count()});
      weights.emplace_back(one.count());
    }
    Reducer reducer(engine, tensors, options);
    DescentTensors sent = weights, mean = weights;
    std::vector<const void*> in;
    std::vector<void*> out;
    for (size_t i = 0; i < weights.size(); ++i) {
      in.push_back(sent[i].data());
      out.push_back(mean[i].data());
    }
    for (uint64_t step = 0; step < steps; ++step) {
      update(static_cast<uint64_t>(engine.rank()), step, weights, sent);
      reducer.run(step, in, out);
      for (size_t i = 0; i < weights.size(); ++i)
        for (size_t k = 0; k < weights[i].size(); ++k) weights[i][k] -= mean[i][k];
      if (engine.rank() == 0) seen(step + 1, weights);
    }
  });
}

}  // namespace gradwire::server
