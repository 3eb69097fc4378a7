// SPDX-License-Identifier: Apache-2.0
// The runner of a message whose tensors stay the same while their codecs change, because they learn. Where two sets of
// codecs take turns from step to step, the runners of both are kept: making one allocates, and waits for the GPU.
#pragma once

#include <memory>
#include <vector>

#include "gradwire/runner.h"

namespace gradwire {

std::vector<Codec> codecs_of(const std::vector<TensorSpec>& specs);

class ChangingRunner {
 public:
  ChangingRunner(std::vector<TensorSpec> specs, const Device& device);
  void recode(std::vector<TensorSpec> specs);  // the same tensors, perhaps with other codecs

  Runner& runner() { return *now_->runner; }
  const Plan& plan() const { return now_->plan; }
  void wait();  // throws what decoding found, in this step or in the one before
  void poll();  // the same for what has been found so far, without waiting

 private:
  struct Coding {
    Coding(std::vector<TensorSpec> specs, const Device& device)
        : plan(std::move(specs)), runner(make_runner(plan, device)) {}
    Plan plan;
    std::unique_ptr<Runner> runner;  // it refers to the plan
  };

  Device device_;
  std::unique_ptr<Coding> now_, other_;  // other_: the one before, if the two take turns
  std::vector<Codec> before_;            // the codecs before those of now_
};

}  // namespace gradwire
