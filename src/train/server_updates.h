// SPDX-License-Identifier: Apache-2.0
// Updates that go to a parameter server, from one worker of a changing number of workers. The server keeps the weights
// and the checkpoints. This file needs neither torch nor gRPC.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/client.h"
#include "train/settings.h"
#include "train/updates.h"

namespace gradwire::train {

class ServerUpdates final : public Updates {
 public:
  // `steps`: the length of the run.
  ServerUpdates(const Settings& settings, uint64_t steps, const ServerPlace& place,
                std::vector<server::Variable> parameters, std::vector<server::Variable> buffers);

  uint64_t begin(std::span<float* const> weights) override;
  StepResult exchange(uint64_t step, std::span<const float* const> updates, std::span<float* const> weights,
                      const Report& report) override;
  void pool(uint64_t step, std::span<float* const> second) override;
  ExchangeStats stats() const override;
  WorkerPlace membership() const override { return {.rank = client_.slot(), .leads = client_.owns_buffers()}; }
  void send_buffers(std::span<const float* const> buffers) override { client_.send_buffers(buffers); }
  bool take_buffers(std::span<float* const> buffers) override { return client_.take_buffers(buffers); }
  nlohmann::json end() override;

 private:
  void tell(uint64_t step, const Report& report);

  server::Client client_;
  uint64_t warm_steps_ = 0, taken_ = 0;
};

}  // namespace gradwire::train
