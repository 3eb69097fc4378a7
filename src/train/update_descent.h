// SPDX-License-Identifier: Apache-2.0
// Descent by updates (updates.h): every worker computes an update from its own gradient, updates are exchanged, and
// weights come back. What an update is follows from the optimizer: a step of Adam (qadam_descent.cc), a momentum
// (momentum_update_descent.cc), or the gradient itself, of which a server makes a step (sgd_descent.cc). Gradients stay
// where the worker computes; updates and weights pass through the host.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/clock.h"
#include "train/descent.h"
#include "train/updates.h"

namespace gradwire::train {

class UpdateDescent : public Descent {
 public:
  UpdateDescent(const DescentParts& parts, std::unique_ptr<Updates> updates);

  uint64_t start() override;
  void begin(const StepInfo& info) override { info_ = info; }
  StepResult finish(const std::function<Report()>& report, const Measure& measure) override;
  ExchangeStats stats() const override;
  std::vector<ErrorFeedback*> residuals() override;
  WorkerPlace membership() const override { return updates_->membership(); }
  nlohmann::json end() override;

 protected:
  // This worker's update, from gradients that are finite and have the right scale. Without gradients, which means that
  // they are not finite, there is none.
  virtual void compute_update(const std::vector<torch::Tensor>* gradients) = 0;
  virtual bool ready() const { return true; }            // false: there is no update in this step
  virtual void exchanged(const StepResult& /*step*/) {}  // the parameters are those of the next step

  const StepInfo& info() const { return info_; }
  Updates& updates() { return *updates_; }
  const std::vector<torch::Tensor>& parameters() const { return parameters_; }
  const std::vector<torch::Tensor>& own() const { return own_; }  // this worker's update
  const std::vector<std::string>& names() const { return names_; }
  void timed(const std::function<void()>& work);
  static std::vector<float*> pointers(const std::vector<torch::Tensor>& tensors);
  static std::vector<const float*> constant(const std::vector<torch::Tensor>& tensors);

 private:
  bool compute();
  void send_buffers();
  void take_weights();

  std::unique_ptr<Updates> updates_;
  double clip_, waited_ = 0;
  std::vector<torch::Tensor> parameters_, own_;
  std::vector<torch::Tensor> host_, weights_;  // updates and weights on the host: the same memory on the CPU
  std::vector<torch::Tensor> buffers_;
  uint64_t led_ = 0;  // steps in which this worker owned the buffers
  std::vector<std::string> names_;
  StepInfo info_;
};

std::unique_ptr<Descent> make_qadam_descent(const DescentParts& parts, std::unique_ptr<Updates> updates);
// `moments` are also among the buffers of `parts`.
std::unique_ptr<Descent> make_momentum_update_descent(const DescentParts& parts, std::unique_ptr<Updates> updates,
                                                      const std::vector<NamedParameter>& moments);
std::vector<NamedParameter> moment_buffers(const std::vector<NamedParameter>& parameters);
std::unique_ptr<Descent> make_sgd_descent(const DescentParts& parts, std::unique_ptr<Updates> updates);

}  // namespace gradwire::train
