// SPDX-License-Identifier: Apache-2.0
// What every model promises: it learns on a task that it fits, all of its parameters get gradients, its weights are a
// function of the seed alone and making it disturbs no other user of torch's generator; dropout is a function of the
// seed that a step began with; specs that are wrong and tasks that do not fit are refused by name. Sizes are compared
// with published numbers.
#include "train/models.h"

#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>

#include <cmath>
#include <thread>

#include "core/bits.h"
#include "gradwire/error.h"

namespace gradwire::train {
namespace {

const torch::Device kCpu(torch::kCPU);

Task images(int64_t channels, int64_t side, int64_t classes = 10) {
  Task task;
  task.name = "images";
  task.classes = classes;
  task.train.shape = {channels, side, side};
  return task;
}

Task sentences() {
  Task task;
  task.name = "sentences";
  task.classes = 4;
  task.vocabulary = 50;
  task.train.shape = {12};
  return task;
}

Task language() {
  Task task;
  task.name = "language";
  task.classes = task.vocabulary = 30;
  task.train.shape = {16};
  task.train.labels_each = 16;
  return task;
}

// Inputs and labels without torch's generator.
struct ModelInput {
  torch::Tensor inputs, labels;
};
ModelInput batch_of(const Task& task, int64_t count) {
  const auto numbers = [](int64_t n, int64_t below, uint64_t salt) {
    std::vector<int64_t> out;
    for (int64_t i = 0; i < n; ++i)
      out.push_back(
          static_cast<int64_t>(mix64(static_cast<uint64_t>(i) + (salt << 40) + 1) % static_cast<uint64_t>(below)));
    return torch::tensor(out, torch::kLong);
  };
  std::vector<int64_t> shape{count};
  int64_t each = 1;
  for (const int64_t n : task.train.shape) shape.push_back(n), each *= n;
  const torch::Tensor labels = numbers(count * static_cast<int64_t>(task.train.labels_each), task.classes, 7);
  if (task.vocabulary) return {numbers(count * each, task.vocabulary, 3).view(shape), labels};
  return {(numbers(count * each, 256, 3).to(torch::kFloat) / 64 - 2).view(shape), labels};
}

std::shared_ptr<Model> make(const std::string& spec, const Task& task, uint64_t seed = 1, double dropout = 0) {
  return make_model({.spec = spec, .dropout = dropout, .seed = seed}, task, std::make_shared<Noise>(kCpu), kCpu);
}

int64_t size_of(Model& model) {
  int64_t count = 0;
  for (const torch::Tensor& p : model.parameters()) count += p.numel();
  return count;
}

bool same_weights(Model& a, Model& b) {
  const auto left = a.parameters(), right = b.parameters();
  if (left.size() != right.size()) return false;
  for (size_t i = 0; i < left.size(); ++i)
    if (!torch::equal(left[i], right[i])) return false;
  return true;
}

// These take a while on a small machine: fewer images, and only those of 28 pixels, the harder case for their pooling.
bool large(const std::string& name) { return name.starts_with("vgg") || name == "resnet18" || name == "resnet34"; }

struct ModelCase {
  std::string spec;
  Task task;
  double dropout = 0;
};
std::vector<ModelCase> cases() {
  std::vector<ModelCase> all;
  for (const ModelInfo& info : models()) {
    if (info.name == "bilstm") {
      all.push_back({"bilstm:embedding=10,hidden=8,layers=2", sentences(), 0.2});
      all.push_back({"bilstm", sentences()});
    } else if (info.name == "gpt") {
      all.push_back({"gpt:layers=2,width=16,heads=2", language(), 0.1});
      all.push_back({"gpt", language()});
    } else {
      const double dropout = info.name == "mlp" || info.name.starts_with("vgg") ? 0.2 : 0;
      all.push_back({info.name, images(1, 28), dropout});
      if (!large(info.name)) all.push_back({info.name, images(3, 32)});
    }
  }
  return all;
}

TEST(Models, EveryModelTakesTwoStepsThatLowerItsLoss) {
  for (const ModelCase& c : cases()) {
    SCOPED_TRACE(c.spec + " on " + c.task.name + std::to_string(c.task.train.shape[0]));
    const auto noise = std::make_shared<Noise>(kCpu);
    const auto model = make_model({.spec = c.spec, .dropout = c.dropout, .seed = 3}, c.task, noise, kCpu);
    const ModelInput batch = batch_of(c.task, large(c.spec) ? 2 : 4);
    std::vector<double> losses;
    for (int step = 0; step < 3; ++step) {
      noise->begin(17);  // the same masks: the loss is the same function at every step
      const torch::Tensor logits = model->forward(batch.inputs);
      ASSERT_EQ(logits.sizes(), (torch::IntArrayRef{batch.labels.size(0), c.task.classes}));
      const torch::Tensor loss = torch::nn::functional::cross_entropy(logits, batch.labels);
      losses.push_back(loss.item<double>());
      ASSERT_TRUE(std::isfinite(losses.back()));
      if (step == 2) break;
      model->zero_grad();
      loss.backward();
      const torch::NoGradGuard guard;
      for (const auto& item : model->named_parameters()) {
        torch::Tensor p = item.value();
        ASSERT_TRUE(p.grad().defined()) << item.key();
        ASSERT_TRUE(p.grad().is_contiguous()) << item.key();  // what sends gradients takes them as plain arrays
        ASSERT_TRUE(p.grad().isfinite().all().item<bool>()) << item.key();
        // A bias before a batch normalisation has a gradient of rounding errors, and the key's bias in attention too;
        // all else has more.
        const double least = item.key().ends_with("bias") ? -1 : 0;
        ASSERT_GT(p.grad().abs().max().item<double>(), least) << item.key();
        p -= 0.002 * p.grad();
      }
    }
    EXPECT_LT(losses[1], losses[0]);
    EXPECT_LT(losses[2], losses[1]);
  }
}

TEST(Models, WeightsAreAFunctionOfTheSeed) {
  for (const ModelCase& c : cases()) {
    SCOPED_TRACE(c.spec);
    const auto a = make(c.spec, c.task, 5), b = make(c.spec, c.task, 5), other = make(c.spec, c.task, 6);
    EXPECT_TRUE(same_weights(*a, *b));
    EXPECT_FALSE(same_weights(*a, *other));
  }
}

TEST(Models, ThreadsThatMakeThemTogetherGetTheSameWeights) {
  std::vector<std::shared_ptr<Model>> made(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 4; ++i) threads.emplace_back([&, i] { made[i] = make("cnn", images(1, 28), 9 + i % 2); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(same_weights(*made[0], *made[2]));
  EXPECT_TRUE(same_weights(*made[1], *made[3]));
  EXPECT_FALSE(same_weights(*made[0], *made[1]));
}

TEST(Models, MakingOneLeavesTheDefaultGeneratorAsItWas) {
  torch::manual_seed(4);
  const torch::Tensor expected = torch::rand({3});
  torch::manual_seed(4);
  make("resnet20", images(3, 32));
  EXPECT_TRUE(torch::equal(torch::rand({3}), expected));
}

TEST(Models, SizesAreThePublishedOnes) {
  const struct {
    std::string spec;
    Task task;
    int64_t size;
  } known[] = {
      {"mlp:width=2800,depth=2", images(1, 28), 784 * 2800 + 2800 + 2800 * 2800 + 2800 + 2800 * 10 + 10},
      {"resnet20", images(3, 32), 269'722},
      {"resnet32", images(3, 32), 464'154},
      {"resnet18", images(3, 32), 11'173'962},
      {"resnet34", images(3, 32), 21'282'122},
      {"resnet18", images(3, 96, 1000), 11'689'512},  // torchvision's
      {"resnet34", images(3, 96, 1000), 21'797'672},
      {"vgg16", images(3, 32), 15'253'578},
  };
  for (const auto& k : known) EXPECT_EQ(size_of(*make(k.spec, k.task)), k.size) << k.spec;
}

TEST(Models, ParametersHaveTheNamesOfPythonsModels) {
  const auto has = [](Model& model, const std::string& name) { return model.named_parameters().contains(name); };
  const auto resnet = make("resnet18", images(3, 32));
  for (const char* name : {"conv1.weight", "bn1.bias", "layer1.0.conv1.weight", "layer2.0.downsample.0.weight",
                           "layer2.0.downsample.1.bias", "layer4.1.bn2.weight", "fc.bias"})
    EXPECT_TRUE(has(*resnet, name)) << name;
  EXPECT_TRUE(resnet->named_buffers().contains("layer1.0.bn1.running_mean"));
  EXPECT_FALSE(has(*resnet, "layer1.0.downsample.0.weight"));
  const auto vgg = make("vgg11", images(3, 32));
  for (const char* name : {"features.0.weight", "features.1.bias", "features.4.weight", "features.25.weight",
                           "features.26.bias", "classifier.0.weight", "classifier.6.bias"})
    EXPECT_TRUE(has(*vgg, name)) << name;
  EXPECT_TRUE(has(*make("bilstm", sentences()), "lstm.weight_ih_l0_reverse"));
  EXPECT_TRUE(has(*make("gpt", language()), "h.3.attn.c_attn.weight"));
}

TEST(Models, LargeImagesEnterAResnetThroughTheLargeStem) {
  const auto model = make("resnet18", images(3, 96));
  model->eval();
  const torch::NoGradGuard guard;
  EXPECT_EQ(model->forward(batch_of(images(3, 96), 1).inputs).sizes(), (torch::IntArrayRef{1, 10}));
  EXPECT_EQ(model->named_parameters()["conv1.weight"].sizes(), (torch::IntArrayRef{64, 3, 7, 7}));
}

TEST(Models, GptDoesNotSeeTheFuture) {
  const auto model = make("gpt:layers=2,width=16,heads=2", language());
  const torch::NoGradGuard guard;
  const torch::Tensor inputs = batch_of(language(), 1).inputs;
  torch::Tensor changed = inputs.clone();
  changed[0][10] = (changed[0][10] + 1) % 30;
  const torch::Tensor before = model->forward(inputs), after = model->forward(changed);
  EXPECT_TRUE(torch::equal(before.slice(0, 0, 10), after.slice(0, 0, 10)));
  for (int64_t i = 10; i < 16; ++i) EXPECT_FALSE(torch::equal(before[i], after[i])) << i;
}

TEST(Models, BilstmLeavesPaddingOutAndTakesATextWithoutWords) {
  const auto model = make("bilstm", sentences());
  const torch::NoGradGuard guard;
  torch::Tensor inputs = batch_of(sentences(), 2).inputs;
  inputs[1].zero_();
  const torch::Tensor logits = model->forward(inputs);
  EXPECT_TRUE(logits.isfinite().all().item<bool>());
  EXPECT_TRUE(torch::equal(logits[1], model->named_parameters()["fc.bias"]));  // a mean of no words is 0
}

TEST(Noise, MasksAreAFunctionOfTheSeed) {
  Noise a(kCpu), b(kCpu);
  const torch::Tensor ones = torch::ones({1000});
  torch::manual_seed(1);
  const torch::Tensor expected = torch::rand({3});
  torch::manual_seed(1);
  a.begin(5);
  const torch::Tensor first = a.dropout(ones, 0.25, true), second = a.dropout(ones, 0.25, true);
  b.begin(6);
  const torch::Tensor other = b.dropout(ones, 0.25, true);
  b.begin(5);
  EXPECT_TRUE(torch::equal(b.dropout(ones, 0.25, true), first));
  EXPECT_TRUE(torch::equal(b.dropout(ones, 0.25, true), second));
  EXPECT_FALSE(torch::equal(first, second));
  EXPECT_FALSE(torch::equal(first, other));
  EXPECT_NEAR(first.eq(0).sum().item<double>(), 250,
              70);  // five deviations of a binomial: 5 * sqrt(1000 * 0.25 * 0.75) = 68
  EXPECT_TRUE(torch::logical_or(first.eq(0), (first - 4.0 / 3).abs().lt(1e-6)).all().item<bool>());
  EXPECT_TRUE(a.dropout(ones, 0.25, false).is_same(ones));
  EXPECT_TRUE(a.dropout(ones, 0, true).is_same(ones));
  EXPECT_TRUE(torch::equal(torch::rand({3}), expected)) << "the default generator was used";
}

TEST(Models, DropoutActsInTrainingOnly) {
  for (const ModelCase& c : cases()) {
    if (c.dropout == 0) continue;
    SCOPED_TRACE(c.spec);
    const auto noise = std::make_shared<Noise>(kCpu);
    const auto model = make_model({.spec = c.spec, .dropout = 0.5, .seed = 2}, c.task, noise, kCpu);
    const torch::Tensor inputs = batch_of(c.task, 4).inputs;
    const torch::NoGradGuard guard;
    const auto run = [&](uint64_t seed) {
      noise->begin(seed);
      return model->forward(inputs);
    };
    EXPECT_TRUE(torch::equal(run(1), run(1)));
    EXPECT_FALSE(torch::equal(run(1), run(2)));
    model->eval();
    EXPECT_TRUE(torch::equal(run(1), run(2)));
  }
}

void refused(const ModelOptions& options, const Task& task, const std::string& field,
             const std::vector<std::string>& parts) {
  SCOPED_TRACE(options.spec);
  try {
    make_model(options, task, std::make_shared<Noise>(kCpu), kCpu);
    ADD_FAILURE() << "was accepted";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.kind(), ErrorKind::usage) << message;
    EXPECT_EQ(error.field(), field) << message;
    for (const std::string& part : parts)
      EXPECT_NE(message.find(part), std::string::npos) << message << "\nlacks " << part;
  }
}

TEST(Models, WrongSpecsAreRefusedByName) {
  const Task task = images(1, 28);
  refused({.spec = "alexnet"}, task, "model", {"'alexnet'", "mlp, cnn, resnet20"});
  refused({.spec = ""}, task, "model", {"''"});
  refused({.spec = "mlp:"}, task, "model", {"'mlp:'", "colon"});
  refused({.spec = "mlp:width"}, task, "width", {"no value", "1 to 65536"});
  refused({.spec = "mlp:width=0"}, task, "width", {"'0'", "1 to 65536"});
  refused({.spec = "mlp:width=5x"}, task, "width", {"'5x'"});
  refused({.spec = "mlp:width=5,width=6"}, task, "width", {"twice"});
  refused({.spec = "mlp:width=5,"}, task, "model", {"'mlp:width=5,'", "comma"});
  refused({.spec = "mlp:hidden=5"}, task, "hidden", {"'hidden'", "width, depth"});
  refused({.spec = "resnet20:width=5"}, task, "width", {"takes none"});
  refused({.spec = "gpt:width=10,heads=4"}, language(), "heads", {"heads is 4", "10"});
  refused({.spec = "mlp", .dropout = 1}, task, "dropout", {"dropout is 1"});
  refused({.spec = "mlp", .dropout = -0.1}, task, "dropout", {"dropout is -0.1"});
  refused({.spec = "cnn", .dropout = 0.5}, task, "dropout", {"cnn has no place"});
}

TEST(Models, TasksThatDoNotFitAreRefused) {
  refused({.spec = "bilstm"}, images(1, 28), "model", {"bilstm", "text with one label per sample", "has images"});
  refused({.spec = "gpt"}, sentences(), "model", {"gpt", "label per token", "one label per sample"});
  refused({.spec = "bilstm"}, language(), "model", {"bilstm", "label per token"});
  refused({.spec = "resnet20"}, sentences(), "model", {"resnet20", "images"});
  refused({.spec = "cnn"}, images(1, 7), "model", {"at least 8 x 8", "7 x 7"});
  refused({.spec = "cnn"}, images(1, 28, 1), "task", {"1 classes"});
}

}  // namespace
}  // namespace gradwire::train
