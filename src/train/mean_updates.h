// SPDX-License-Identifier: Apache-2.0
// Updates without a server: the workers of an Engine hold the same weights in full precision, average their updates by
// a compressed all-reduce and all do what a server would, so what goes down needs no sending. What they send:
//
//   weights   everybody gets everybody's update (gather); the next gradient is computed at the weights as the codec
//             `down` leaves them. The paper's algorithm.
//   updates   the mean itself is compressed once more, with the owner's error feedback (scatter); the next gradient is
//             computed at the weights in full precision. The same authors' Efficient-Adam.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/timer.h"
#include "train/updates.h"

namespace gradwire::train {

class MeanUpdates final : public Updates {
 public:
  // Collective. The method of `options` tells which of the two; with gather, `down` is the codec, or rules, of the
  // weights. Everything is the host's.
  MeanUpdates(Engine& engine, std::vector<NamedTensor> tensors, ReduceOptions options, const std::string& down,
              std::chrono::milliseconds timeout);

  uint64_t begin(std::span<float* const> weights) override;
  Taken exchange(uint64_t step, std::span<const float* const> updates, std::span<float* const> weights,
                 const Report& report) override;
  Taken skip(uint64_t step, std::span<float* const> weights, const Report& report) override;
  void pool(uint64_t step, std::span<float* const> second) override;

  double bits() const override;
  uint64_t bytes_sent() const override { return engine_->bytes_sent(); }
  ReduceTimes times() const override;
  ReduceMemory memory() const override;

  std::vector<std::span<float>> held() override;
  void save(const std::string& path) const override;
  void load(const std::string& path) override;

 private:
  using Arrays = std::vector<std::vector<float>>;
  Arrays make_arrays() const;
  void hand_out(uint64_t step, std::span<float* const> weights);  // as they go down

  std::unique_ptr<Engine> engine_;  // its own, so that its bytes are counted alone
  std::vector<NamedTensor> tensors_;
  ReduceOptions options_;
  std::unique_ptr<Reducer> reducer_;
  std::unique_ptr<Reducer> second_;  // pools moments
  Arrays weights_, means_;
  std::optional<Plan> plan_;  // of the weights; none: they go down as they are
  std::unique_ptr<Runner> runner_;
  std::vector<std::byte> message_;
  ReduceTimer clock_;
};

}  // namespace gradwire::train
