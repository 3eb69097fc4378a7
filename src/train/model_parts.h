// SPDX-License-Identifier: Apache-2.0
// What the makers of models are given, and the makers: vision.cc has the models of images, sequence.cc those of text. A
// maker may rely on a task that fits and on parameters in range; models.cc sees to both.
#pragma once

#include <memory>

#include "codec/define.h"
#include "train/models.h"

namespace gradwire::train {

// One dropout rate for all places of a model.
struct Dropout {
  std::shared_ptr<Noise> noise;
  double probability = 0;
  torch::Tensor operator()(const torch::Tensor& x, bool training) const {
    return noise ? noise->dropout(x, probability, training) : x;
  }
};

struct Parts {
  const Task& task;
  Values values;  // the parameters of the spec
  Dropout dropout;

  int64_t integer(const char* name) const { return values.integer(name); }
  int64_t channels() const { return task.train.shape[0]; }
  int64_t height() const { return task.train.shape[1]; }
  int64_t width() const { return task.train.shape[2]; }
};

using Maker = std::shared_ptr<Model> (*)(const Parts&);
std::shared_ptr<Model> make_mlp(const Parts& parts);
std::shared_ptr<Model> make_cnn(const Parts& parts);
std::shared_ptr<Model> make_resnet20(const Parts& parts);
std::shared_ptr<Model> make_resnet32(const Parts& parts);
std::shared_ptr<Model> make_resnet18(const Parts& parts);
std::shared_ptr<Model> make_resnet34(const Parts& parts);
std::shared_ptr<Model> make_vgg11(const Parts& parts);
std::shared_ptr<Model> make_vgg16(const Parts& parts);
std::shared_ptr<Model> make_bilstm(const Parts& parts);
std::shared_ptr<Model> make_gpt(const Parts& parts);

}  // namespace gradwire::train
