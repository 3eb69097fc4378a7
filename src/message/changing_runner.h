// SPDX-License-Identifier: Apache-2.0
// The runner of a message whose tensors stay the same while their codecs change, because they learn. Making a runner
// allocates and waits for the GPU. So a runner takes new tables over where it can, and those of codecs that were used
// lately are kept, since a codec that learns how many bits it needs comes back to the same few widths.
#pragma once

#include <list>
#include <memory>
#include <vector>

#include "gradwire/runner.h"

namespace gradwire {

std::vector<Codec> codecs_of(const std::vector<TensorSpec>& specs);

class ChangingRunner {
 public:
  ChangingRunner(std::vector<TensorSpec> specs, const Device& device);
  void recode(std::vector<TensorSpec> specs);  // the same tensors, perhaps with other codecs

  Runner& runner() { return *now().runner; }
  std::shared_ptr<Runner> shared_runner() { return {codings_.front(), &runner()}; }
  const Plan& plan() const { return *codings_.front()->plan; }
  void wait();  // throws what decoding found, in this step or in those before
  void poll();  // the same for what has been found so far, without waiting
  // Of the runner in use with its tables: no other one has it or will have it, so what was recorded is known by it.
  uint64_t id() const { return codings_.front()->id; }

 private:
  static constexpr size_t kKept = 4;
  struct Coding {
    Coding(std::vector<TensorSpec> specs, const Device& device)
        : plan(std::make_unique<Plan>(std::move(specs))), runner(make_runner(*plan, device)) {}
    std::unique_ptr<Plan> plan;
    std::unique_ptr<Runner> runner;  // it refers to the plan
    uint64_t id = next_id();
  };
  static uint64_t next_id();
  Coding& now() { return *codings_.front(); }

  Device device_;
  std::list<std::shared_ptr<Coding>> codings_;  // the one in use first, then by how lately they were
};

}  // namespace gradwire
