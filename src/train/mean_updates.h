// SPDX-License-Identifier: Apache-2.0
// Updates without a server: the workers of an Engine hold the same weights in full precision, average their updates by
// a compressed all-reduce, and each of them does what a server would do, so that no weights need to be sent back.
//
//   weights   every worker receives every update (gather); the next gradient is computed at the weights as the codec
//             `down` leaves them. This is the paper's algorithm. All workers hold the same weights, so a codec that
//             learns learns the same everywhere.
//   updates   the mean itself is compressed once more, with the owner's error feedback (scatter); the next gradient is
//             computed at the weights in full precision. This is Efficient-Adam, by the same authors.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/timer.h"
#include "server/shard_coders.h"
#include "train/updates.h"

namespace gradwire::train {

class MeanUpdates final : public Updates {
 public:
  // Collective. The method of `options` selects one of the two; with gather, `down` is the codec, or rules, of the
  // weights. All arrays are on the host.
  MeanUpdates(Engine& engine, std::vector<NamedTensor> tensors, ReduceOptions options, const std::string& down,
              std::chrono::milliseconds timeout);

  uint64_t begin(std::span<float* const> weights) override;
  StepResult exchange(uint64_t step, std::span<const float* const> updates, std::span<float* const> weights,
                      const Report& report) override;
  void pool(uint64_t step, std::span<float* const> second) override;

  ExchangeStats stats() const override;
  std::vector<std::span<float>> held() override;
  ErrorFeedback* residuals() override { return &reducer_->feedback(); }

 private:
  using Arrays = std::vector<std::vector<float>>;
  Arrays make_arrays() const;
  double bits() const;
  void send_down(uint64_t step, std::span<float* const> weights);  // through the codec `down`
  void resume_learning();

  std::unique_ptr<Engine> engine_;  // its own, so that its bytes are counted alone
  std::vector<NamedTensor> tensors_;
  ReduceOptions options_;
  std::unique_ptr<Reducer> reducer_;
  std::unique_ptr<Reducer> second_;  // pools moments
  Arrays weights_, means_;
  std::optional<server::ShardWriter> writer_;  // of the weights; none: they are not compressed
  bool resumed_ = false;                       // what it learned has been looked for among the residuals
  std::vector<std::byte> message_;
  ReduceTimer timer_;
};

}  // namespace gradwire::train
