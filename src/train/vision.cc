// SPDX-License-Identifier: Apache-2.0
// The models of images, {batch, channels, height, width} to {batch, classes}.
//
//   mlp          fc1, fc2, ...: hidden layers with ReLU and dropout
//   cnn          a 5x5 convolution in steps of two pixels, two 3x3 ones with pooling, two linear layers;
//                no batch normalisation, so nothing differs per worker
//   resnet20/32  He et al. 2016, section 4.2: 16-32-64 channels; shortcuts skip pixels and pad channels with
//                zeros (option A)
//   resnet18/34  the same paper's larger ones with 1x1 shortcuts; images up to 64 pixels enter through a 3x3
//                convolution, as is usual for CIFAR
//   vgg11/16     Simonyan and Zisserman 2015 with batch normalisation and a classifier of 512 units; pooling
//                rounds up, so that 28 pixels can be halved five times
//
// Residual and vgg models have torchvision's parameter names. Their convolutions start as He et al. 2015 say (fan out),
// those of cnn too (fan in; torch's default is smaller and learned more slowly in a trial); all else starts as torch's
// layers do.
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <initializer_list>

#include "gradwire/error.h"
#include "train/model_parts.h"

namespace gradwire::train {
namespace {

using torch::Tensor;
using torch::nn::BatchNorm2d;
using torch::nn::Conv2d;
using torch::nn::Linear;

Tensor pooled(const Tensor& x, bool round_up = false) { return torch::max_pool2d(x, 2, 2, 0, 1, round_up); }

struct Mlp : Model {
  explicit Mlp(const Parts& parts) : dropout(parts.dropout) {
    int64_t inputs = parts.channels() * parts.height() * parts.width();
    const int64_t depth = parts.integer("depth");
    for (int64_t i = 0; i <= depth; ++i) {
      const int64_t outputs = i < depth ? parts.integer("width") : parts.task.classes;
      layers.push_back(register_module("fc" + std::to_string(i + 1), Linear(inputs, outputs)));
      inputs = outputs;
    }
  }
  Tensor forward(Tensor x) override {
    x = x.flatten(1);
    for (size_t i = 0; i + 1 < layers.size(); ++i) x = dropout(torch::relu(layers[i]->forward(x)), is_training());
    return layers.back()->forward(x);
  }
  Dropout dropout;
  std::vector<Linear> layers;
};

struct Cnn : Model {
  explicit Cnn(const Parts& parts) {
    if (parts.height() < 8 || parts.width() < 8)
      throw Error(ErrorKind::usage,
                  "model is cnn, which wants images of at least 8 x 8 pixels; the task has " +
                      std::to_string(parts.height()) + " x " + std::to_string(parts.width()),
                  "model");
    const int64_t c = parts.integer("width");
    const auto halved = [](int64_t side) { return (side + 1) / 2; };  // by conv1, which rounds up; pooling rounds down
    conv1 = register_module("conv1", Conv2d(torch::nn::Conv2dOptions(parts.channels(), c, 5).stride(2).padding(2)));
    conv2 = register_module("conv2", Conv2d(torch::nn::Conv2dOptions(c, 2 * c, 3).padding(1)));
    conv3 = register_module("conv3", Conv2d(torch::nn::Conv2dOptions(2 * c, 4 * c, 3).padding(1)));
    for (const Conv2d& conv : {conv1, conv2, conv3}) {
      torch::nn::init::kaiming_normal_(conv->weight, 0, torch::kFanIn, torch::kReLU);
      torch::nn::init::zeros_(conv->bias);
    }
    fc1 = register_module("fc1", Linear(4 * c * (halved(parts.height()) / 4) * (halved(parts.width()) / 4), 8 * c));
    fc2 = register_module("fc2", Linear(8 * c, parts.task.classes));
  }
  // Pooling before ReLU gives the same numbers and rectifies a quarter of them. On a CPU torch pools several times
  // faster where the channels of a pixel are neighbours.
  Tensor forward(Tensor x) override {
    x = torch::relu(conv1->forward(x)).contiguous(torch::MemoryFormat::ChannelsLast);
    x = torch::relu(pooled(conv2->forward(x)));
    x = torch::relu(pooled(conv3->forward(x)));
    return fc2->forward(torch::relu(fc1->forward(x.flatten(1))));
  }
  Conv2d conv1{nullptr}, conv2{nullptr}, conv3{nullptr};
  Linear fc1{nullptr}, fc2{nullptr};
};

// A convolution that a batch normalisation follows needs no bias.
Conv2d convolution(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  Conv2d conv(torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
  torch::nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut, torch::kReLU);
  return conv;
}

struct Block : torch::nn::Module {
  Block(int64_t in, int64_t out, int64_t stride, bool bare) : stride(stride), padding(bare ? (out - in) / 2 : 0) {
    conv1 = register_module("conv1", convolution(in, out, 3, stride));
    bn1 = register_module("bn1", BatchNorm2d(out));
    conv2 = register_module("conv2", convolution(out, out, 3, 1));
    bn2 = register_module("bn2", BatchNorm2d(out));
    if (bare || (stride == 1 && in == out)) return;
    const auto downsample = register_module("downsample", std::make_shared<torch::nn::Module>());
    short_conv = downsample->register_module("0", convolution(in, out, 1, stride));
    short_bn = downsample->register_module("1", BatchNorm2d(out));
  }
  Tensor forward(const Tensor& x) {
    Tensor y = torch::relu(bn1->forward(conv1->forward(x)));
    y = bn2->forward(conv2->forward(y));
    return torch::relu(y + shortcut(x));
  }
  Tensor shortcut(const Tensor& x) {
    if (short_conv) return short_bn->forward(short_conv->forward(x));
    if (stride == 1 && padding == 0) return x;
    const Tensor fewer = x.slice(2, 0, std::nullopt, stride).slice(3, 0, std::nullopt, stride);
    return torch::constant_pad_nd(fewer, {0, 0, 0, 0, padding, padding});
  }
  int64_t stride, padding;  // channels of zeros on either side
  Conv2d conv1{nullptr}, conv2{nullptr}, short_conv{nullptr};
  BatchNorm2d bn1{nullptr}, bn2{nullptr}, short_bn{nullptr};
};

struct Resnet : Model {
  Resnet(const Parts& parts, int64_t channels, std::initializer_list<int> blocks_of_layers, bool bare)
      : large(!bare && std::max(parts.height(), parts.width()) > 64) {
    conv1 = register_module("conv1", convolution(parts.channels(), channels, large ? 7 : 3, large ? 2 : 1));
    bn1 = register_module("bn1", BatchNorm2d(channels));
    int64_t in = channels, out = channels;
    int number = 0;
    for (const int count : blocks_of_layers) {
      const auto layer = register_module("layer" + std::to_string(++number), std::make_shared<torch::nn::Module>());
      for (int b = 0; b < count; ++b) {
        const int64_t stride = number > 1 && b == 0 ? 2 : 1;
        blocks.push_back(layer->register_module(std::to_string(b), std::make_shared<Block>(in, out, stride, bare)));
        in = out;
      }
      out *= 2;
    }
    fc = register_module("fc", Linear(in, parts.task.classes));
  }
  Tensor forward(Tensor x) override {
    x = torch::relu(bn1->forward(conv1->forward(x)));
    if (large) x = torch::max_pool2d(x, 3, 2, 1);
    for (const auto& block : blocks) x = block->forward(x);
    return fc->forward(x.mean({2, 3}));
  }
  bool large;  // as for ImageNet: a stem that makes images four times smaller
  Conv2d conv1{nullptr};
  BatchNorm2d bn1{nullptr};
  std::vector<std::shared_ptr<Block>> blocks;
  Linear fc{nullptr};
};

struct Vgg : Model {
  static constexpr int kPool = 0;
  static constexpr int64_t kUnits = 512;

  Vgg(const Parts& parts, std::initializer_list<int> plan) : plan(plan), dropout(parts.dropout) {
    const auto features = register_module("features", std::make_shared<torch::nn::Module>());
    int64_t in = parts.channels();
    int place = 0;  // as in torchvision's list: a convolution, its normalisation and its ReLU have a place each, and so
                    // has pooling
    for (const int out : plan) {
      if (out == kPool) {
        ++place;
        continue;
      }
      Conv2d conv(torch::nn::Conv2dOptions(in, out, 3).padding(1));
      torch::nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut, torch::kReLU);
      torch::nn::init::zeros_(conv->bias);
      convs.push_back(features->register_module(std::to_string(place), conv));
      norms.push_back(features->register_module(std::to_string(place + 1), BatchNorm2d(out)));
      place += 3;
      in = out;
    }
    const auto classifier = register_module("classifier", std::make_shared<torch::nn::Module>());
    linear1 = classifier->register_module("0", Linear(in, kUnits));
    linear2 = classifier->register_module("3", Linear(kUnits, kUnits));
    linear3 = classifier->register_module("6", Linear(kUnits, parts.task.classes));
  }
  Tensor forward(Tensor x) override {
    size_t layer = 0;
    for (const int out : plan) {
      if (out == kPool) {
        x = pooled(x, true);
      } else {
        x = torch::relu(norms[layer]->forward(convs[layer]->forward(x)));
        ++layer;
      }
    }
    x = x.mean({2, 3});
    x = dropout(torch::relu(linear1->forward(x)), is_training());
    x = dropout(torch::relu(linear2->forward(x)), is_training());
    return linear3->forward(x);
  }
  std::vector<int> plan;  // channels of convolutions, and where to pool
  Dropout dropout;
  std::vector<Conv2d> convs;
  std::vector<BatchNorm2d> norms;
  Linear linear1{nullptr}, linear2{nullptr}, linear3{nullptr};
};

constexpr int M = Vgg::kPool;

}  // namespace

std::shared_ptr<Model> make_mlp(const Parts& parts) { return std::make_shared<Mlp>(parts); }
std::shared_ptr<Model> make_cnn(const Parts& parts) { return std::make_shared<Cnn>(parts); }
std::shared_ptr<Model> make_resnet20(const Parts& parts) {
  return std::make_shared<Resnet>(parts, 16, std::initializer_list<int>{3, 3, 3}, true);
}
std::shared_ptr<Model> make_resnet32(const Parts& parts) {
  return std::make_shared<Resnet>(parts, 16, std::initializer_list<int>{5, 5, 5}, true);
}
std::shared_ptr<Model> make_resnet18(const Parts& parts) {
  return std::make_shared<Resnet>(parts, 64, std::initializer_list<int>{2, 2, 2, 2}, false);
}
std::shared_ptr<Model> make_resnet34(const Parts& parts) {
  return std::make_shared<Resnet>(parts, 64, std::initializer_list<int>{3, 4, 6, 3}, false);
}
std::shared_ptr<Model> make_vgg11(const Parts& parts) {
  return std::make_shared<Vgg>(parts, std::initializer_list<int>{64, M, 128, M, 256, 256, M, 512, 512, M, 512, 512, M});
}
std::shared_ptr<Model> make_vgg16(const Parts& parts) {
  return std::make_shared<Vgg>(
      parts, std::initializer_list<int>{64, 64, M, 128, 128, M, 256, 256, 256, M, 512, 512, 512, M, 512, 512, 512, M});
}

}  // namespace gradwire::train
