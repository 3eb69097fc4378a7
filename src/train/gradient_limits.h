// SPDX-License-Identifier: Apache-2.0
// Clipping for workers that exchange momenta. Adam stays stable because a gradient that is far too large is clipped
// before it enters the momentum. A clip of the averaged momentum comes too late for that: a gradient of ten times the
// limit is only a tenth of the momentum. So every worker clips its own gradient.
//
// The norm of a whole gradient is known only when the backward pass has ended, and by then most of it was sent. So each
// parameter has a limit of its own: the share of the clip that it had in the norms of earlier steps.
//
//   n_i       the norm of this worker's gradient of parameter i, without the loss scale
//   level_i   a running mean of n_i over about 20 steps in which n_i is not 0; no n_i counts for more than 3 level_i
//   limit_i   clip * level_i / sqrt(sum of level_j^2)
//
// The squares of the limits add up to that of the clip, so the norm of the whole gradient stays below the clip.
#pragma once

#include <torch/types.h>

#include <span>
#include <vector>

namespace gradwire::train {

class GradientLimits {
 public:
  GradientLimits(size_t parameters, double clip, torch::Device device);  // clip 0: no limits

  // Scales gradients of some parameters down to their limits, in place. Only enqueues on a GPU. What is not finite
  // stays so.
  void apply(std::span<const size_t> some, const std::vector<torch::Tensor>& gradients, double loss_scale);
  void commit();  // the step was taken: levels follow what apply has seen

  const torch::Tensor& levels() const { return levels_; }  // kept with a run: the number of steps, then a level each

 private:
  double clip_;
  torch::Tensor levels_, seen_;
};

}  // namespace gradwire::train
