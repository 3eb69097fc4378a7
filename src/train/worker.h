// SPDX-License-Identifier: Apache-2.0
// One worker of a run. worker.cc is the training loop, from top to bottom; worker_state.cc has checkpoints, events and
// the record of the run. All workers start from the same weights, see their own samples, exchange gradients or updates,
// and take the same steps, so their weights are bit-identical after every step.
#pragma once

#include <c10/core/Stream.h>
#include <torch/types.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "train/batches.h"
#include "train/checkpoint.h"
#include "train/control.h"
#include "train/descent.h"
#include "train/models.h"
#include "train/run.h"
#include "train/settings.h"

namespace gradwire::train {

// A step with a value that is not finite is skipped; with fp16 the loss scale is then reduced as well.
struct LossScale {
  double value = 1;
  uint64_t good = 0;  // steps since it last changed
  bool moves = false;

  void fine();
  void overflowed();
};

nlohmann::json number(double value);  // null if it is not finite

class Worker {
 public:
  Worker(Engine& engine, const TrainingJob& job);
  // Trains to the end, or until it is stopped. Returns the record of the run (docs/training.md), on every rank.
  nlohmann::json train();

 private:
  struct EpochSums {  // of the epoch so far, this worker's own
    double loss = 0;
    uint64_t labels = 0, right = 0;
    EpochSums& operator+=(const EpochSums& other);
    double mean_loss() const;
    double accuracy() const;
  };
  struct Score {  // of a batch; on a GPU perhaps not computed yet
    torch::Tensor loss, right;
    uint64_t labels;
  };
  struct Seconds {  // so far
    double wall = 0, compute = 0, wait = 0;
    ReduceTimes codec;
    Seconds& operator+=(const Seconds& other);
    nlohmann::json mean(double workers) const;  // of one worker
  };
  // What workers send to each other after each step.
  struct StepStats {
    EpochSums sums;
    Seconds seconds;
    uint64_t bytes_sent, weights;
    bool stop;
  };

  void step();
  Score score_of(const Batch& batch);
  static void add(EpochSums& sums, const Score& score);
  void measure_layers(const std::vector<torch::Tensor>& exact, const std::vector<torch::Tensor>& got);
  std::pair<double, double> evaluate();  // loss, accuracy
  void evaluate_between();               // a point of the curve before the epoch ends
  void end_epoch();
  void begin_or_resume();
  void resume(uint64_t step);
  void take_rank();
  void save();
  nlohmann::json record() const;
  nlohmann::json learned() const;
  StepStats step_stats() const;
  uint64_t weights_hash() const;
  void compare_weights(const std::vector<uint64_t>& hashes) const;
  uint64_t elements() const;  // of all parameters
  TensorMap parameters() const;
  TensorMap buffers() const;
  Device codec_device() const;
  void tell(nlohmann::json event) const;
  void tell_step(const std::vector<StepStats>& all);

  Engine& engine_;
  TrainingJob job_;
  const Settings& settings_;
  Control control_;
  torch::Device device_;
  std::optional<c10::Stream> stream_;  // on a GPU every worker has its own
  std::shared_ptr<Noise> noise_;
  std::shared_ptr<Model> model_;
  Batches batches_;
  std::unique_ptr<Descent> descent_;
  std::unique_ptr<Checkpoints> checkpoints_;

  int rank_ = 0;        // decides which samples are this worker's
  uint64_t total_ = 0;  // steps
  uint64_t step_ = 0;   // that comes next
  uint64_t skipped_ = 0;
  std::optional<uint64_t> saved_;  // the step of the newest checkpoint
  LossScale scale_;
  EpochSums sums_;
  EpochSums told_;  // all workers', as of the last event of a step
  Seconds seconds_;
  uint64_t sent_before_ = 0;  // bytes, before this process
  Seconds seconds_before_;
  double bits_sum_ = 0;  // of this epoch
  bool stopping_ = false;
  nlohmann::json epochs_, points_, bits_, layers_;  // measured so far
  nlohmann::json set_aside_;                        // the damaged checkpoint that was not resumed, if any
};

}  // namespace gradwire::train
