// SPDX-License-Identifier: Apache-2.0
#include "train/warm_up.h"

#include <ATen/Parallel.h>
#include <torch/autograd.h>
#include <torch/nn/functional/loss.h>

#include <algorithm>

#include "train/batches.h"
#include "train/models.h"

namespace gradwire::train {

void warm_up(const TrainingJob& job) {
  at::set_num_threads(1);  // the threads inside one call would meet just as workers do
  torch::sqrt(torch::ones({64}));
  if (job.settings.device != "cpu") return;
  // Two samples take every path that a batch takes: batch normalisation refuses one.
  Settings settings = job.settings;
  settings.workers = settings.accumulate = 1;
  settings.batch = static_cast<int>(std::min<uint64_t>(2, job.task.train.count));
  const Batch batch = Batches(job.task, settings, 0, torch::kCPU).training(0, 0);
  const auto noise = std::make_shared<Noise>(torch::kCPU);
  const auto model = make_model({.spec = settings.model, .dropout = settings.dropout, .seed = settings.seed}, job.task,
                                noise, torch::kCPU);
  torch::nn::functional::cross_entropy(model->forward(batch.inputs), batch.labels).backward();
}

}  // namespace gradwire::train
