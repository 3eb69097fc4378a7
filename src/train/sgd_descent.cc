// SPDX-License-Identifier: Apache-2.0
// sgd with a parameter server: see update_descent.h. Workers send gradients. The server has the weights in full
// precision and the momentum of all workers, so a worker has nothing to keep, and one that joins has nothing to catch
// up on.
#include <torch/autograd.h>

#include "train/update_descent.h"

namespace gradwire::train {
namespace {

class SgdDescent final : public UpdateDescent {
 public:
  using UpdateDescent::UpdateDescent;
  DescentState state() override { return {}; }
  void restore(const DescentState&) override {}

 private:
  void compute_update(const std::vector<torch::Tensor>* gradients) override {
    if (gradients) torch::_foreach_copy_(own(), *gradients);
  }
};

}  // namespace

std::unique_ptr<Descent> make_sgd_descent(const DescentParts& parts, std::unique_ptr<Updates> updates) {
  return std::make_unique<SgdDescent>(parts, std::move(updates));
}

}  // namespace gradwire::train
