// SPDX-License-Identifier: Apache-2.0
// How gradients leave a worker and come back as means. Parameters are grouped in buckets, last layer first, one Reducer
// each; while back-propagation goes on, a bucket whose gradients are all there is sent at once, always in the same
// order on all ranks.
//
// Hooks run where autograd does, on a GPU in one thread for all workers of the process: they only enqueue. Waiting is
// for the worker's own thread, in finish().
#pragma once

#include <c10/core/Stream.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gradwire/collective.h"
#include "train/settings.h"

namespace gradwire::train {

struct NamedParameter {
  std::string name;
  torch::Tensor tensor;
};

NamedTensor describe(const NamedParameter& parameter);

// What is exchanged in place of the gradients: one tensor per parameter, which also receives the mean. `fill` writes
// those of some parameters from their gradients; it is called before they are sent, where autograd runs, and on a GPU
// it enqueues on the worker's stream.
struct SentValues {
  std::vector<torch::Tensor> tensors;
  std::function<void(std::span<const size_t> parameters)> fill;
};

class Exchange {
 public:
  // `stream`: where the worker computes, on a GPU.
  Exchange(Engine& engine, std::vector<NamedParameter> parameters, const ReduceOptions& options, double bucket_bytes,
           std::optional<c10::Stream> stream, SentValues values = {}, const FirstSteps& first = {});
  ~Exchange();

  // The next backward pass brings the gradients of `step`; with `overlap` they leave as they come, else in finish().
  void begin(uint64_t step, double loss_scale, double rate, bool overlap);
  // Sends what was not sent, waits until all gradients are means.
  void finish();
  // As all ranks decide alike, having seen the same means.
  void commit();
  void rollback();

  // The exact means of what would be sent now, by fp32, over another engine so that nothing here counts them.
  std::vector<torch::Tensor> exact_means(Engine& engine, uint64_t step) const;

  double bits() const;  // per element sent up, of the last step
  uint64_t elements() const { return elements_; }
  size_t buckets() const { return buckets_.size(); }
  ReduceTimes times() const;
  ReduceMemory memory() const;
  std::vector<ErrorFeedback*> residuals();  // one per bucket

  struct Learned {
    Direction direction;
    Codec codec;
    std::vector<std::string> tensors;
  };
  // Codecs with what they had learned at the last step, and the tensors that use them.
  std::vector<Learned> learned() const;

 private:
  struct Bucket;
  void gradient_ready(size_t parameter);
  void send(Bucket& bucket);
  Reducer& active(const Bucket& bucket) const;        // of the step that is under way
  const torch::Tensor& sent(size_t parameter) const;  // its gradient, or what goes in its place
  std::vector<Reducer*> all_reducers() const;

  Engine& engine_;
  std::vector<NamedParameter> parameters_;
  ReduceOptions options_;
  std::optional<c10::Stream> stream_;
  SentValues values_;
  uint64_t first_steps_ = 0;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  std::vector<size_t> bucket_of_;  // per parameter
  uint64_t elements_ = 0, step_ = 0;
  double loss_scale_ = 1;
  bool overlap_ = false;
  size_t next_ = 0;  // the bucket to be sent next
};

}  // namespace gradwire::train
