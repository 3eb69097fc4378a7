// SPDX-License-Identifier: Apache-2.0
// From a spec such as "mlp:width=2800,depth=2" to a model: the list of models, the checks, and the one place where
// weights are drawn. They are drawn on the CPU from torch's default generator, because torch's own layers draw from it.
// A lock and a saved state hide that from other users of the generator: threads that make models at the same time get
// the same weights, and the generator continues from the state that it had before.
#include "train/models.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>

#include "core/check.h"
#include "core/spec.h"
#include "gradwire/error.h"
#include "train/model_parts.h"

namespace gradwire::train {
namespace {

enum class Fits { images, sentences, language };  // sentences have one label, a language's tokens one each

struct ModelEntry {
  std::string name, summary;
  Fits fits;
  bool dropout;  // has a place for it
  Maker make;
  std::vector<Parameter> parameters;
};

Parameter integer(const char* name, int fallback, int low, int high, const char* meaning) {
  return {name, Parameter::Type::integer, std::to_string(fallback), double(low), double(high), {}, meaning};
}

const std::vector<ModelEntry>& entries() {
  static const std::vector<ModelEntry> all = {
      {"mlp",
       "hidden layers of equal width, each with ReLU",
       Fits::images,
       true,
       make_mlp,
       {integer("width", 512, 1, 65'536, "units of a hidden layer"), integer("depth", 2, 1, 64, "hidden layers")}},
      {"cnn",
       "three convolutions and two linear layers; small and fast on a CPU",
       Fits::images,
       false,
       make_cnn,
       {integer("width", 16, 1, 1024,
                "channels of the first convolution; the next two have twice and four times as many")}},
      {"resnet20",
       "residual network for CIFAR, 16-32-64 channels, shortcuts without parameters (option A)",
       Fits::images,
       false,
       make_resnet20,
       {}},
      {"resnet32", "the same with 32 layers", Fits::images, false, make_resnet32, {}},
      {"resnet18",
       "residual network, 64-128-256-512 channels, 1x1 shortcuts, 3x3 stem for images up to 64 pixels",
       Fits::images,
       false,
       make_resnet18,
       {}},
      {"resnet34", "the same with 34 layers", Fits::images, false, make_resnet34, {}},
      {"vgg11",
       "plain convolutions with batch normalisation, classifier of 512 units",
       Fits::images,
       true,
       make_vgg11,
       {}},
      {"vgg16", "the same with 16 layers", Fits::images, true, make_vgg16, {}},
      {"bilstm",
       "LSTM in both directions over words, mean over time",
       Fits::sentences,
       true,
       make_bilstm,
       {integer("embedding", 100, 1, 4096, "numbers that stand for a word"),
        integer("hidden", 128, 1, 8192, "units of one direction"),
        integer("layers", 1, 1, 16, "LSTMs on top of each other")}},
      {"gpt",
       "transformer for language, normalisation first, learned positions, the embedding is the head as well",
       Fits::language,
       true,
       make_gpt,
       {integer("layers", 4, 1, 96, "blocks"), integer("width", 128, 1, 16'384, "numbers that stand for a token"),
        integer("heads", 4, 1, 256, "heads of attention; they divide the width")}},
  };
  return all;
}

std::string names() {
  std::vector<std::string> all;
  for (const ModelEntry& entry : entries()) all.push_back(entry.name);
  return fmt::format("{}", fmt::join(all, ", "));
}

void expect_fit(const ModelEntry& entry, const Task& task) {
  const Samples& samples = task.train;
  const Fits found = task.vocabulary == 0 ? Fits::images
                     : task.classes == task.vocabulary && samples.shape.size() == 1 &&
                             samples.labels_each == static_cast<uint64_t>(samples.shape[0])
                         ? Fits::language
                         : Fits::sentences;
  const auto words = [](Fits fits) {
    return fits == Fits::images      ? "images"
           : fits == Fits::sentences ? "text with one label per sample"
                                     : "text with one label per token";
  };
  if (found != entry.fits)
    throw Error(ErrorKind::usage,
                fmt::format("model is {}, which wants {}; the task {} has {}", entry.name, words(entry.fits), task.name,
                            words(found)),
                "model");
  if (samples.shape.size() != (found == Fits::images ? 3u : 1u) || task.classes < 2)
    throw Error(ErrorKind::usage,
                fmt::format("the task {} has samples of {} dimensions and {} classes; a model wants {} and at least 2",
                            task.name, samples.shape.size(), task.classes, found == Fits::images ? 3 : 1),
                "task");
}

// The default generator of the CPU, seeded anew for the life of this object.
class BorrowedGenerator {
 public:
  explicit BorrowedGenerator(uint64_t seed) : alone_(mutex()), generator_(at::detail::getDefaultCPUGenerator()) {
    const std::lock_guard lock(generator_.mutex());
    state_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  ~BorrowedGenerator() {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(state_);
  }
  BorrowedGenerator(const BorrowedGenerator&) = delete;
  BorrowedGenerator& operator=(const BorrowedGenerator&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  std::lock_guard<std::mutex> alone_;
  at::Generator generator_;
  torch::Tensor state_;
};

at::Generator copy_of_default(torch::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return generator.clone();
}

}  // namespace

Noise::Noise(torch::Device device) : generator_(copy_of_default(device)) { begin(0); }

void Noise::begin(uint64_t seed) {
  const std::lock_guard lock(generator_.mutex());
  generator_.set_current_seed(seed);
}

torch::Tensor Noise::dropout(const torch::Tensor& x, double probability, bool training) {
  if (!training || probability == 0) return x;
  return x * torch::empty_like(x).bernoulli_(1 - probability, generator_).div_(1 - probability);
}

const std::vector<ModelInfo>& models() {
  static const std::vector<ModelInfo> list = [] {
    std::vector<ModelInfo> all;
    for (const ModelEntry& entry : entries()) {
      std::vector<std::string> parameters;
      for (const Parameter& p : entry.parameters)
        parameters.push_back(fmt::format("{}={} ({}): {}", p.name, p.fallback, p.allowed(), p.meaning));
      all.push_back({entry.name, entry.summary, fmt::format("{}", fmt::join(parameters, "; "))});
    }
    return all;
  }();
  return list;
}

std::shared_ptr<Model> make_model(const ModelOptions& options, const Task& task, std::shared_ptr<Noise> noise,
                                  torch::Device device) {
  const std::string name(name_of_spec(options.spec));
  const auto entry =
      std::find_if(entries().begin(), entries().end(), [&](const ModelEntry& e) { return e.name == name; });
  if (entry == entries().end())
    throw Error(ErrorKind::usage, fmt::format("model is '{}'; known are {}", shown(name), names()), "model");
  const Values values{parse_spec("model", options.spec, entry->parameters)};
  expect_fit(*entry, task);
  if (!(options.dropout >= 0 && options.dropout < 1))
    throw Error(ErrorKind::usage, fmt::format("dropout is {}; allowed is a number from 0 to below 1", options.dropout),
                "dropout");
  if (options.dropout > 0 && !entry->dropout)
    throw Error(ErrorKind::usage, fmt::format("dropout is {}; {} has no place for it", options.dropout, name),
                "dropout");
  GW_CHECK(noise || options.dropout == 0);
  std::shared_ptr<Model> model;
  {
    const BorrowedGenerator generator(options.seed);
    model = entry->make({task, values, {std::move(noise), options.dropout}});
  }
  model->to(device);
  model->train();
  return model;
}

}  // namespace gradwire::train
