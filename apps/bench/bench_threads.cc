// SPDX-License-Identifier: Apache-2.0
// `gradwire bench threads`: what T threads gain over one. T cores of a shared machine are rarely T times as fast as
// one, so a loop that only computes is run with one thread and with T in the same rounds. The gain of a codec over the
// gain of that loop shows the quality of the codec's threading.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/bench_case.h"
#include "bench/synthetic.h"
#include "cli/command.h"
#include "cli/console.h"
#include "cli/options.h"

namespace gradwire::app {
namespace {

struct ThreadsOptions {
  std::vector<std::string> codecs = {"qsgd:bits=4"};
  uint64_t elements = 16777216;
  int pairs = 15, threads = machine_threads();
  std::string simd;
  bool json = false;
};

std::atomic<uint64_t> sink;  // keeps the compiler from dropping the loop

// Integer work in registers, about 20 ms, the same for every thread.
void compute_only() {
  uint64_t state = 1;
  for (int i = 0; i < 10'000'000; ++i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
  }
  sink.fetch_xor(state, std::memory_order_relaxed);
}

struct Gains {
  std::vector<double> gain, relative;  // T threads over one; the same over the compute loop's gain of that round
  void add(double one, double many, double compute_gain) {
    gain.push_back(one / many);
    relative.push_back(one / many / compute_gain);
  }
};

nlohmann::ordered_json measure(const std::string& spec, const ThreadsOptions& options, std::span<const float> values,
                               Progress& progress) {
  const std::unique_ptr<BenchBackend> one_backend = make_backend({.device = "cpu", .threads = 1, .simd = options.simd});
  const std::unique_ptr<BenchBackend> many_backend =
      make_backend({.device = "cpu", .threads = options.threads, .simd = options.simd});
  const BenchCaseOptions case_options{Codec::parse(spec)};
  progress.show(spec + ": verifying against the scalar reference");
  verify_against_reference(*many_backend, case_options, values);
  const std::vector<NamedTensor> tensors = {{"tensor", values.size(), DType::f32, 2}};
  BenchCase one(*one_backend, tensors, case_options, values, 1);
  BenchCase many(*many_backend, tensors, case_options, values, 1);
  ThreadTeam team(options.threads);

  std::vector<double> compute_gains;
  Gains encode, feedback, decode, copy;
  uint64_t turn = 0;
  const uint64_t count = std::clamp<uint64_t>((uint64_t{1} << 20) / values.size(), 1, 64);
  const auto seconds = [&](BenchBackend& backend, BenchCase& bench_case, void (BenchCase::*work)(uint64_t)) {
    return backend.time([&] {
      for (uint64_t i = 0; i < count; ++i) (bench_case.*work)(++turn);
    });
  };
  for (int round = 0; round < options.pairs; ++round) {
    progress.show(fmt::format("{}: round {} of {}", spec, round + 1, options.pairs));
    const double alone = one_backend->time(compute_only);
    const double together = many_backend->time([&] { team.run([](int) { compute_only(); }); });
    const double compute_gain = options.threads * alone / together;  // T times the work was done
    compute_gains.push_back(compute_gain);
    const auto compare = [&](Gains& gains, void (BenchCase::*work)(uint64_t)) {
      const double single = seconds(*one_backend, one, work);
      gains.add(single, seconds(*many_backend, many, work), compute_gain);
    };
    compare(encode, &BenchCase::encode);
    compare(feedback, &BenchCase::feedback);
    compare(decode, &BenchCase::decode);
    compare(copy, &BenchCase::copy);
  }
  return {{"codec", spec},
          {"device", "cpu"},
          {"threads", options.threads},
          {"elements", values.size()},
          {"compute_scaling", median(compute_gains)},
          {"scaling_encode", median(encode.relative)},
          {"scaling_feedback", median(feedback.relative)},
          {"scaling_decode", median(decode.relative)},
          {"gain_encode", median(encode.gain)},
          {"gain_feedback", median(feedback.gain)},
          {"gain_decode", median(decode.gain)},
          {"gain_copy", median(copy.gain)},
          {"pairs", options.pairs}};
}

void bench_threads(const ThreadsOptions& options) {
  Progress progress;
  progress.show("making a gradient");
  std::vector<float> values(options.elements);
  fill_gradient(values, 1, machine_threads());
  std::vector<nlohmann::ordered_json> rows;
  for (const std::string& spec : options.codecs) {
    rows.push_back(measure(spec, options, values, progress));
    if (options.json) {
      progress.clear();
      print(rows.back().dump() + "\n");
    }
  }
  if (options.json) return;
  progress.clear();
  print(fmt::format("{} elements, {} threads against one; verified; medians of {} interleaved rounds\n\n",
                    human_count(options.elements), options.threads, options.pairs));
  ConsoleTable table("lrrrrrrrr", {"codec", "compute loop", "copy", "encode", "feedback", "decode", "encode/loop",
                                   "feedback/loop", "decode/loop"});
  for (const auto& row : rows) {
    std::vector<std::string> cells = {row.at("codec").get<std::string>()};
    for (const char* name : {"compute_scaling", "gain_copy", "gain_encode", "gain_feedback", "gain_decode",
                             "scaling_encode", "scaling_feedback", "scaling_decode"})
      cells.push_back(fmt::format("{:.2f}", row.at(name).get<double>()));
    table.row(cells);
  }
  print(table.str());
  print(
      "\nThe figures are the gain of the threads over one thread. The last three are divided by the gain of a loop "
      "that only\n"
      "computes.\n");
}

}  // namespace

void add_bench_threads(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand("threads", "Measure what several CPU threads gain over one");
  auto options = std::make_shared<ThreadsOptions>();
  add_codec(*command, options->codecs, "Codec with parameters; may be given several times");
  add_whole(*command, "--threads", options->threads, 2, 1024, "Number of threads to compare with one");
  add_whole(*command, "--elements", options->elements, 1, kMostElements, "Number of elements of the tensor");
  add_whole(*command, "--pairs", options->pairs, 1, 100000, "Number of rounds");
  add_simd(*command, options->simd);
  command->add_flag("--json", options->json, "Print one JSON object per codec");
  command->footer("Example:\n  gradwire bench threads --codec qsgd:bits=4 --threads 2");
  command->callback([&action, options] {
    for (const std::string& spec : options->codecs) Codec::parse(spec);
    action = [options] { bench_threads(*options); };
  });
}

}  // namespace gradwire::app
