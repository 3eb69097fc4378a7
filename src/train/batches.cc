// SPDX-License-Identifier: Apache-2.0
#include "train/batches.h"

#include <fmt/format.h>
#include <torch/autograd.h>

#include <algorithm>
#include <numeric>

#include "core/bits.h"
#include "gradwire/error.h"

namespace gradwire::train {
namespace {

constexpr uint64_t kTestBatch = 250;

int64_t elements_of(const Samples& samples) {
  return std::accumulate(samples.shape.begin(), samples.shape.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace

Batches::Batches(const Task& task, const Settings& settings, int rank, torch::Device device)
    : task_(task),
      settings_(settings),
      rank_(static_cast<uint64_t>(rank)),
      per_epoch_(settings.steps_per_epoch(task.train.count)),
      order_seed_(settings.seed),
      device_(device) {
  if (per_epoch_ == 0)
    throw Error(
        ErrorKind::usage,
        fmt::format("batch {} x {} passes x {} workers are {} samples per step; {} has {} training samples: take "
                    "smaller batches or fewer workers",
                    settings.batch, settings.accumulate, settings.workers,
                    static_cast<uint64_t>(settings.batch) * static_cast<uint64_t>(settings.accumulate) *
                        static_cast<uint64_t>(settings.workers),
                    task.name, task.train.count),
        "batch");
  if (task.vocabulary == 0) {
    const auto per_channel = [&](const std::vector<float>& values) {
      return (torch::tensor(values) * 255).view({static_cast<int64_t>(values.size()), 1, 1}).to(device);
    };
    mean_ = per_channel(task.mean);
    deviation_ = per_channel(task.deviation);
  }
}

Batch Batches::training(uint64_t step, int pass) {
  const uint64_t epoch = step / per_epoch_, batch = static_cast<uint64_t>(settings_.batch);
  if (epoch != ordered_epoch_) {
    order_ = epoch_order(task_.train.count, order_seed_, epoch);
    ordered_epoch_ = epoch;
  }
  const uint64_t passes = static_cast<uint64_t>(settings_.accumulate),
                 workers = static_cast<uint64_t>(settings_.workers);
  const uint64_t first = (((step % per_epoch_) * passes + static_cast<uint64_t>(pass)) * workers + rank_) * batch;
  return collect(task_.train, std::span(order_).subspan(first, batch), true, epoch);
}

void Batches::take_rank(uint32_t rank) {
  const uint32_t workers = static_cast<uint32_t>(settings_.workers);
  rank_ = rank % workers;
  order_seed_ = settings_.seed + mix64(rank / workers);  // mix64(0) is 0
  ordered_epoch_ = UINT64_MAX;
  alone_ = true;
}

std::vector<std::pair<uint64_t, uint64_t>> Batches::test_ranges() const {
  const uint64_t workers = static_cast<uint64_t>(settings_.workers), count = task_.test.count;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  const uint64_t end = alone_ ? count : (rank_ + 1) * count / workers;
  for (uint64_t first = alone_ ? 0 : rank_ * count / workers; first < end; first += kTestBatch)
    ranges.emplace_back(first, std::min(kTestBatch, end - first));
  return ranges;
}

Batch Batches::test(uint64_t first, uint64_t count) const {
  std::vector<uint32_t> which(count);
  std::iota(which.begin(), which.end(), static_cast<uint32_t>(first));
  return collect(task_.test, which, false, 0);
}

Batch Batches::collect(const Samples& samples, std::span<const uint32_t> which, bool augment, uint64_t epoch) const {
  const int64_t rows = static_cast<int64_t>(which.size()), each = elements_of(samples),
                labels_each = static_cast<int64_t>(samples.labels_each);
  std::vector<int64_t> shape{rows};
  shape.insert(shape.end(), samples.shape.begin(), samples.shape.end());
  torch::Tensor inputs = torch::empty(shape, task_.vocabulary > 0 ? torch::kInt64 : torch::kUInt8);
  torch::Tensor labels = torch::empty({rows * labels_each}, torch::kInt64);
  int64_t* const label = labels.data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t sample = which[static_cast<size_t>(row)];
    if (task_.vocabulary > 0)
      std::copy_n(samples.tokens.data() + sample * each, each, inputs.data_ptr<int64_t>() + row * each);
    else
      copy_pixels(task_, samples, static_cast<uint64_t>(sample), augment, settings_.seed, epoch,
                  {inputs.data_ptr<uint8_t>() + row * each, static_cast<size_t>(each)});
    std::copy_n(samples.labels.data() + sample * labels_each, labels_each, label + row * labels_each);
  }
  inputs = inputs.to(device_);
  if (task_.vocabulary == 0) inputs = (inputs.to(torch::kFloat32) - mean_) / deviation_;
  return {inputs, labels.to(device_)};
}

}  // namespace gradwire::train
