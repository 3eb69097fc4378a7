// SPDX-License-Identifier: Apache-2.0
// From gradients to the weights of the next step: what happens after a worker's back-propagation, in one of two ways.
//
//   GradientDescent   gradients are exchanged while they are computed; all workers then take the same step with the
//                     mean (sgd, adam, adamw)
//   QAdamDescent      every worker makes an update of its own gradient; updates are exchanged, and weights come back
//                     (qadam), from the other workers or from a server: see updates.h
//
// A step: begin() before the last backward pass, exchange() after it, then apply().
#pragma once

#include <c10/core/Stream.h>
#include <torch/types.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "train/control.h"
#include "train/exchange.h"
#include "train/settings.h"
#include "train/updates.h"

namespace gradwire::train {

using TensorMap = std::map<std::string, torch::Tensor>;

struct Now {
  uint64_t step = 0;
  double rate = 0;
  double loss_scale = 1;  // that gradients arrive multiplied by
  bool metered = false;   // the mean that is applied is to be compared with the exact one
};

class Descent {
 public:
  virtual ~Descent() = default;

  // Of a run that begins, not one that is resumed. Returns the first step.
  virtual uint64_t start() = 0;

  virtual void begin(const Now& now) = 0;
  // Sends what there is to send and waits for what comes back. `report`, called once, reads the scores of the step,
  // which on a GPU waits for it.
  virtual void exchange(const std::function<Report()>& report) = 0;
  virtual const std::vector<torch::Tensor>& exact_means() const = 0;  // between the two, if metered; else empty
  virtual Taken apply() = 0;

  double waited() const { return waited_; }  // seconds on the wall, so far
  virtual double bits() const = 0;           // per element sent up, of the last step
  virtual uint64_t bytes_sent() const = 0;   // so far
  virtual ReduceTimes times() const = 0;
  virtual ReduceMemory memory() const = 0;
  virtual std::vector<Exchange::Learned> learned() const = 0;
  virtual size_t buckets() const = 0;

  // For checkpoints: what is alike on all ranks, and what is this rank's own. To resume, both are asked for, filled
  // with what was saved, and given back.
  virtual TensorMap shared_state() = 0;
  virtual TensorMap own_state() = 0;
  virtual void restore(const TensorMap& shared, const TensorMap& own) = 0;
  // Files of residuals, and of what codecs have learned, one a bucket.
  virtual void save_residuals(size_t bucket, const std::string& path) const = 0;
  virtual void load_residuals(size_t bucket, const std::string& path) = 0;

  // As in Updates.
  virtual std::optional<uint32_t> seat() const { return std::nullopt; }
  virtual bool leads() const { return true; }
  virtual nlohmann::json end() { return nullptr; }

 protected:
  double waited_ = 0;
};

struct DescentParts {
  Engine& engine;  // for gradients and updates
  Control& control;
  const Settings& settings;
  double timeout = 0;  // seconds
  std::vector<NamedParameter> parameters;
  std::optional<c10::Stream> stream;  // where the worker computes, on a GPU
  Device codec_device;
  const ServerPlace* server = nullptr;  // null: the engine's ranks are all there is
  std::vector<NamedParameter> buffers;  // what the model keeps beside its parameters, in f32

  Device compute_device() const;  // where the worker computes: the device of the codecs, on the worker's own stream
};

// Collective.
std::unique_ptr<Descent> make_descent(const DescentParts& parts);
std::unique_ptr<Descent> make_qadam_descent(const DescentParts& parts, std::unique_ptr<Updates> updates);

}  // namespace gradwire::train
