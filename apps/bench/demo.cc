// SPDX-License-Identifier: Apache-2.0
// `gradwire demo`: the whole idea in one table. Ranks in this process hold the gradients of a model with the shapes of
// ResNet-50 (a common component plus noise of their own) and average them by a compressed all-reduce, once per codec.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "bench/reduce_bench.h"
#include "bench/resnet50.h"
#include "bench/synthetic.h"
#include "cli/command.h"
#include "cli/console.h"
#include "cli/options.h"
#include "gradwire/error.h"

namespace gradwire::app {
namespace {

constexpr const char* kCodecs[] = {
    "fp32",           "fp16",           "bf16",        "qsgd:bits=8",     "qsgd:bits=4",
    "qsgd:bits=2",    "terngrad",       "onebit",      "topk:ratio=0.01", "optquant:bits=3",
    "dqsgd:budget=4", "fft:theta=0.85", "casq:bits=2", "loggrid:k=2"};
constexpr double kLinkBitsPerSecond = 1e9;

double bits_per_element(const std::vector<NamedTensor>& tensors, const std::string& spec) {
  std::vector<TensorSpec> list;
  for (const NamedTensor& tensor : tensors)
    list.push_back({tensor.name, tensor.count, tensor.dtype, Codec::parse(spec)});
  return 8.0 * static_cast<double>(Plan(list).message_bytes()) / static_cast<double>(total_elements(tensors));
}

void demo(int world, int steps) {
  const std::vector<NamedTensor> tensors = resnet50_tensors();
  print(fmt::format(
      "{} workers in this process average the gradients of ResNet-50 ({} tensors, {} elements), once per codec.\n"
      "Every step: encode, all-to-all, decode and add, encode the mean, all-gather, decode. Median of {} step{}.\n\n",
      world, tensors.size(), human_count(total_elements(tensors)), steps, steps == 1 ? "" : "s"));

  Progress progress;
  std::vector<std::vector<float>> ranks;
  for (int rank = 0; rank < world; ++rank) {
    progress.show(fmt::format("making the gradients of worker {} of {}", rank + 1, world));
    ranks.push_back(worker_gradients(tensors, rank, 1));
  }
  const std::vector<float> mean = exact_mean(ranks);

  ConsoleTable table("lrrrrrrr", {"codec", "bits/element", "sent/worker", "ratio", "error", "time", "time/fp32 time",
                                  "time at 1 Gb/s"});
  bool identical = true;
  std::string with_feedback;
  size_t number = 0;
  for (const char* spec : kCodecs) {
    ++number;
    ReduceBenchOptions options;
    options.tensors = tensors;
    options.steps = steps;
    options.reduce.up = spec;
    ReduceBenchResult result;
    run_loopback(world, [&](Engine& engine) {
      const size_t rank = static_cast<size_t>(engine.rank());
      const ReduceBenchResult own =
          run_reduce_bench(engine, options, {ranks[rank], mean}, [&](const std::string& text) {
            progress.show(fmt::format("codec {} of {}: {}, {}", number, std::size(kCodecs), spec, text));
          });
      if (rank == 0) result = own;
    });
    identical &= result.identical;
    if (Codec::parse(spec).traits().feedback) with_feedback += std::string(with_feedback.empty() ? "" : ", ") + spec;
    const double bytes = static_cast<double>(result.bytes_sent);
    table.row({spec, fmt::format("{:.3f}", bits_per_element(tensors, spec)), human_bytes(bytes),
               fmt::format("{:.2f}", result.ratio()), human_fraction(result.error), human_seconds(result.time_s),
               fmt::format("{:.2f}", result.time_over_fp32),
               human_seconds(result.time_s + 8 * bytes / kLinkBitsPerSecond)});
  }
  progress.clear();
  print(table.str());
  print(fmt::format(
      "\nAll workers held bit-identical results after every step: {}.\n"
      "ratio: fp32 bytes / bytes sent.\n"
      "error: squared relative error of one step, ||mean - result||^2 / ||mean||^2. An unbiased codec with few bits "
      "may "
      "exceed 1;\n"
      "its errors cancel over steps and workers. Codecs with error feedback by default ({}) send the rest\n"
      "in later steps.\n"
      "time: {} workers share the {} core{} of this machine, and memory is the link. The last column adds the time "
      "that "
      "the bytes\n"
      "sent would take on a link of 1 Gb/s; that part is computed, not measured.\n"
      "\nNext:  gradwire codecs    gradwire bench codec --codec all    gradwire encode --help    gradwire doctor\n",
      identical ? "yes" : "NO", with_feedback, world, machine_threads(), machine_threads() == 1 ? "" : "s"));
  if (!identical) throw std::runtime_error("verification failed: workers hold different results");
}

}  // namespace

void add_demo(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("demo", "Show what each codec does to the gradients of ResNet-50, as a table");
  struct DemoOptions {
    int world = 4, steps = 3;
  };
  auto options = std::make_shared<DemoOptions>();
  add_whole(*command, "--world", options->world, 1, 64, "Number of workers");
  add_whole(*command, "--steps", options->steps, 1, 1000, "Timed steps per codec; one more runs first to warm up");
  command->footer("Example:\n  gradwire demo --world 4 --steps 3");
  command->callback([&action, options] { action = [options] { demo(options->world, options->steps); }; });
}

}  // namespace gradwire::app
