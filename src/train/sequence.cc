// SPDX-License-Identifier: Apache-2.0
// The models of text: token numbers {batch, length} in.
//
//   bilstm  an LSTM in both directions over embedded words; the mean of its outputs over the words (padding,
//           number 0, is left out) is classified: {batch, classes} out. Both directions read the padding, whose
//           embedding is zero.
//   gpt     blocks of causal attention and a two-layer perceptron, each behind a layer normalisation, over token
//           and position embeddings; the head is the token embedding itself (tied): {batch * length, vocabulary}
//           out. Weights start as in GPT-2.
//
// Dropout: bilstm on the embedded words and on the mean, gpt on the embeddings and on what each half of a block adds.
// There is none inside torch's LSTM and attention, since these would draw from the process-wide generator.
#include <torch/nn/init.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include <cmath>

#include "gradwire/error.h"
#include "train/model_parts.h"

namespace gradwire::train {
namespace {

using torch::Tensor;
using torch::nn::Embedding;
using torch::nn::LayerNorm;
using torch::nn::Linear;

struct BiLstm : Model {
  explicit BiLstm(const Parts& parts) : dropout(parts.dropout) {
    const int64_t width = parts.integer("embedding"), hidden = parts.integer("hidden");
    embedding = register_module("embedding",
                                Embedding(torch::nn::EmbeddingOptions(parts.task.vocabulary, width).padding_idx(0)));
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(width, hidden)
                                                       .num_layers(parts.integer("layers"))
                                                       .bidirectional(true)
                                                       .batch_first(true)));
    fc = register_module("fc", Linear(2 * hidden, parts.task.classes));
  }
  Tensor forward(Tensor tokens) override {
    const Tensor words = dropout(embedding->forward(tokens), is_training());
    const Tensor outputs = std::get<0>(lstm->forward(words));
    const Tensor present = tokens.ne(0).unsqueeze(2).to(outputs.scalar_type());
    const Tensor mean = (outputs * present).sum(1) / present.sum(1).clamp_min(1);  // a text without words has mean 0
    return fc->forward(dropout(mean, is_training()));
  }
  Dropout dropout;
  Embedding embedding{nullptr};
  torch::nn::LSTM lstm{nullptr};
  Linear fc{nullptr};
};

constexpr double kSpread = 0.02;

Linear linear(int64_t in, int64_t out, double spread) {
  Linear layer(in, out);
  torch::nn::init::normal_(layer->weight, 0, spread);
  torch::nn::init::zeros_(layer->bias);
  return layer;
}

Embedding embedding(int64_t count, int64_t width) {
  Embedding layer(count, width);
  torch::nn::init::normal_(layer->weight, 0, kSpread);
  return layer;
}

LayerNorm normalisation(int64_t width) { return LayerNorm(torch::nn::LayerNormOptions({width})); }

struct GptBlock : torch::nn::Module {
  // What goes onto the residual path is smaller the more of it there is.
  GptBlock(int64_t width, int64_t heads, int64_t layers, const Dropout& dropout) : heads(heads), dropout(dropout) {
    const double small = kSpread / std::sqrt(2.0 * static_cast<double>(layers));
    ln_1 = register_module("ln_1", normalisation(width));
    const auto attention = register_module("attn", std::make_shared<torch::nn::Module>());
    qkv = attention->register_module("c_attn", linear(width, 3 * width, kSpread));
    mix = attention->register_module("c_proj", linear(width, width, small));
    ln_2 = register_module("ln_2", normalisation(width));
    const auto perceptron = register_module("mlp", std::make_shared<torch::nn::Module>());
    up = perceptron->register_module("c_fc", linear(width, 4 * width, kSpread));
    down = perceptron->register_module("c_proj", linear(4 * width, width, small));
  }
  Tensor forward(Tensor x) {
    x = x + dropout(attend(ln_1->forward(x)), is_training());
    return x + dropout(down->forward(torch::gelu(up->forward(ln_2->forward(x)), "tanh")), is_training());
  }
  Tensor attend(const Tensor& x) {
    const int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
    const Tensor all = qkv->forward(x).view({batch, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const Tensor y = torch::scaled_dot_product_attention(all[0], all[1], all[2], {}, 0.0, true);
    return mix->forward(y.transpose(1, 2).reshape({batch, length, width}));
  }
  int64_t heads;
  Dropout dropout;
  LayerNorm ln_1{nullptr}, ln_2{nullptr};
  Linear qkv{nullptr}, mix{nullptr}, up{nullptr}, down{nullptr};
};

struct Gpt : Model {
  explicit Gpt(const Parts& parts) : dropout(parts.dropout) {
    const int64_t width = parts.integer("width"), heads = parts.integer("heads"), layers = parts.integer("layers");
    if (width % heads)
      throw Error(ErrorKind::usage,
                  "heads is " + std::to_string(heads) + "; allowed is a divisor of the width, " + std::to_string(width),
                  "heads");
    wte = register_module("wte", embedding(parts.task.vocabulary, width));
    wpe = register_module("wpe", embedding(parts.task.train.shape[0], width));
    const auto list = register_module("h", std::make_shared<torch::nn::Module>());
    for (int64_t i = 0; i < layers; ++i)
      blocks.push_back(
          list->register_module(std::to_string(i), std::make_shared<GptBlock>(width, heads, layers, dropout)));
    ln_f = register_module("ln_f", normalisation(width));
  }
  Tensor forward(Tensor tokens) override {
    const Tensor positions = wpe->weight.slice(0, 0, tokens.size(1));
    Tensor x = dropout(wte->forward(tokens) + positions, is_training());
    for (const auto& block : blocks) x = block->forward(x);
    return torch::linear(ln_f->forward(x), wte->weight).flatten(0, 1);
  }
  Dropout dropout;
  Embedding wte{nullptr}, wpe{nullptr};
  std::vector<std::shared_ptr<GptBlock>> blocks;
  LayerNorm ln_f{nullptr};
};

}  // namespace

std::shared_ptr<Model> make_bilstm(const Parts& parts) { return std::make_shared<BiLstm>(parts); }
std::shared_ptr<Model> make_gpt(const Parts& parts) { return std::make_shared<Gpt>(parts); }

}  // namespace gradwire::train
