// SPDX-License-Identifier: Apache-2.0
// ResNet-50 for 224 x 224 images and 1000 classes: a 7x7 stem, four stages of 3, 4, 6 and 3 bottleneck blocks (1x1,
// 3x3, 1x1 convolution, each with a batch norm), a projection in the first block of each stage, and one linear layer.
#include "bench/resnet50.h"

#include <fmt/format.h>

#include "core/check.h"

namespace gradwire::app {
namespace {

class Builder {
 public:
  void convolution(const std::string& name, uint64_t out, uint64_t in, uint64_t side) {
    list_.push_back({name + ".weight", out * in * side * side, DType::f32, 4, out});
  }
  void norm(const std::string& name, uint64_t channels) {
    list_.push_back({name + ".weight", channels, DType::f32, 1});
    list_.push_back({name + ".bias", channels, DType::f32, 1});
  }
  void linear(const std::string& name, uint64_t out, uint64_t in) {
    list_.push_back({name + ".weight", out * in, DType::f32, 2, out});
    list_.push_back({name + ".bias", out, DType::f32, 1});
  }
  std::vector<NamedTensor> list_;
};

}  // namespace

std::vector<NamedTensor> resnet50_tensors() {
  constexpr uint64_t kBlocks[] = {3, 4, 6, 3};
  constexpr uint64_t kExpansion = 4;
  Builder model;
  model.convolution("conv1", 64, 3, 7);
  model.norm("bn1", 64);
  uint64_t in = 64;
  for (uint64_t stage = 0; stage < 4; ++stage) {
    const uint64_t width = uint64_t{64} << stage;
    for (uint64_t block = 0; block < kBlocks[stage]; ++block) {
      const std::string prefix = fmt::format("layer{}.{}.", stage + 1, block);
      model.convolution(prefix + "conv1", width, in, 1);
      model.norm(prefix + "bn1", width);
      model.convolution(prefix + "conv2", width, width, 3);
      model.norm(prefix + "bn2", width);
      model.convolution(prefix + "conv3", width * kExpansion, width, 1);
      model.norm(prefix + "bn3", width * kExpansion);
      if (block == 0) {
        model.convolution(prefix + "downsample.0", width * kExpansion, in, 1);
        model.norm(prefix + "downsample.1", width * kExpansion);
      }
      in = width * kExpansion;
    }
  }
  model.linear("fc", 1000, in);
  GW_CHECK(model.list_.size() == 161 && total_elements(model.list_) == 25'557'032);
  return std::move(model.list_);
}

uint64_t total_elements(const std::vector<NamedTensor>& tensors) {
  uint64_t total = 0;
  for (const NamedTensor& tensor : tensors) total += tensor.count;
  return total;
}

}  // namespace gradwire::app
