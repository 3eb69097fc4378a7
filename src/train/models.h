// SPDX-License-Identifier: Apache-2.0
// The models, by name with integer parameters, spelt like codecs: "mlp:width=2800,depth=2". Each is a torch module that
// takes a batch and gives logits, one row a label. Parameters have the names that the same model has in Python's torch,
// where there is one. The same seed gives the same weights on every rank.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

#include "train/data.h"

namespace gradwire::train {

// Random masks for dropout, of one worker: begin(seed) before each step, so that a mask is a function of (seed, step,
// rank) and the process-wide generator is never used.
class Noise {
 public:
  explicit Noise(torch::Device device);
  void begin(uint64_t seed);
  torch::Tensor dropout(const torch::Tensor& x, double probability, bool training);

 private:
  at::Generator generator_;
};

class Model : public torch::nn::Module {
 public:
  virtual torch::Tensor forward(torch::Tensor x) = 0;
};

struct ModelInfo {
  std::string name, summary, parameters;
};
const std::vector<ModelInfo>& models();

struct ModelOptions {
  std::string spec = "cnn";
  double dropout = 0;  // where a model has a place for it
  uint64_t seed = 0;
};
// Throws Error{usage} where the spec is wrong or the model does not fit the task (a bilstm wants text, a resnet
// images).
std::shared_ptr<Model> make_model(const ModelOptions& options, const Task& task, std::shared_ptr<Noise> noise,
                                  torch::Device device);

}  // namespace gradwire::train
