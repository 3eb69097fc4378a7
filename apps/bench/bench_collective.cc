// SPDX-License-Identifier: Apache-2.0
// `gradwire bench collective`: a compressed all-reduce against fp32, among threads of this process (loopback) or among
// the processes of an mpirun. Rank 0 prints.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/reduce_bench.h"
#include "bench/resnet50.h"
#include "bench/synthetic.h"
#include "cli/command.h"
#include "cli/console.h"
#include "cli/mpi_session.h"
#include "cli/options.h"
#include "collective/factor_plan.h"
#include "gradwire/error.h"

namespace gradwire::app {
namespace {

struct CollectiveOptions {
  std::vector<std::string> codecs = {"qsgd:bits=4"};
  std::string engine = "loopback", method = "scatter", list, residual = "f32", down;
  std::string nodes = "0";
  int world = 4;
  bool world_chosen = false;
  uint64_t elements = 16777216;
  int steps = 15, threads = 1;
  bool json = false;
};

struct CollectiveRow {
  std::string codec;
  ReduceBenchResult result;
};

ReduceBenchOptions reduce_bench_options(const CollectiveOptions& options, const std::string& codec) {
  ReduceBenchOptions bench;
  bench.tensors = options.list.empty() ? std::vector<NamedTensor>{{"gradient", options.elements, DType::f32, 2}}
                                       : resnet50_tensors();
  bench.reduce.method = options.method == "gather" ? ReduceOptions::Method::gather : ReduceOptions::Method::scatter;
  bench.reduce.up = codec;
  bench.reduce.down = options.down;
  bench.reduce.residual = parse_dtype(options.residual);
  bench.reduce.device.threads = options.threads;
  bench.reduce.nodes = options.nodes == "auto" ? ReduceOptions::kAutoNodes : std::stoi(options.nodes);
  bench.steps = options.steps;
  return bench;
}

std::vector<std::vector<float>> all_gradients(const std::vector<NamedTensor>& tensors, int world, Progress* progress) {
  std::vector<std::vector<float>> ranks;
  for (int rank = 0; rank < world; ++rank) {
    if (progress != nullptr) progress->show(fmt::format("making the gradients of rank {} of {}", rank + 1, world));
    ranks.push_back(worker_gradients(tensors, rank, 1));
  }
  return ranks;
}

// What two levels are about. fp32 has two levels, too.
void print_nodes(const std::vector<CollectiveRow>& rows) {
  if (rows.front().result.nodes == 0) return;
  ConsoleTable table("lrrrrrr", {"codec", "left/node", "fp32", "one level", "time", "one level", "time/one level"});
  for (const auto& [codec, result] : rows)
    table.row({codec, human_bytes(static_cast<double>(result.node_bytes)),
               human_bytes(static_cast<double>(result.node_bytes_fp32)),
               human_bytes(static_cast<double>(result.node_bytes_one_level)), human_seconds(result.time_s),
               human_seconds(result.one_level_time_s), fmt::format("{:.2f}", result.time_over_one_level)});
  print(fmt::format("\n{} node{}; left/node: bytes that leave a node in a step\n\n{}", rows.front().result.nodes,
                    rows.front().result.nodes == 1 ? "" : "s", table.str()));
}

void print_rows(const CollectiveOptions& options, const std::string& engine, int world, uint64_t elements,
                const std::vector<CollectiveRow>& rows) {
  if (options.json) {
    for (const auto& [codec, result] : rows) {
      nlohmann::ordered_json row = {{"collective", options.method},
                                    {"codec", codec},
                                    {"engine", engine},
                                    {"world", world},
                                    {"elements", elements},
                                    {"time_s", result.time_s},
                                    {"fp32_time_s", result.fp32_time_s},
                                    {"bytes_sent", result.bytes_sent},
                                    {"bytes_sent_fp32", result.bytes_sent_fp32},
                                    {"ratio", result.ratio()},
                                    {"error", result.error},
                                    {"identical", result.identical},
                                    {"time_over_fp32", result.time_over_fp32},
                                    {"steps", options.steps},
                                    {"threads", options.threads},
                                    {"tensors", options.list.empty() ? 1 : 161}};
      if (result.nodes > 0)
        row.update({{"nodes", result.nodes},
                    {"node_bytes", result.node_bytes},
                    {"node_bytes_fp32", result.node_bytes_fp32},
                    {"node_bytes_one_level", result.node_bytes_one_level},
                    {"one_level_time_s", result.one_level_time_s},
                    {"time_over_one_level", result.time_over_one_level}});
      print(row.dump() + "\n");
    }
    return;
  }
  print(fmt::format(
      "{} of {} elements{} among {} ranks, engine {}; median of {} step{}, in turns with fp32 by scatter\n\n",
      options.method, human_count(elements), options.list.empty() ? "" : " in 161 tensors", world, engine,
      options.steps, options.steps == 1 ? "" : "s"));
  ConsoleTable table("lrrrrrrrl", {"codec", "sent/rank", "fp32", "ratio", "error", "time", "fp32 time",
                                   "time/fp32 time", "identical"});
  for (const auto& [codec, result] : rows)
    table.row({codec, human_bytes(static_cast<double>(result.bytes_sent)),
               human_bytes(static_cast<double>(result.bytes_sent_fp32)), fmt::format("{:.2f}", result.ratio()),
               human_fraction(result.error), human_seconds(result.time_s), human_seconds(result.fp32_time_s),
               fmt::format("{:.2f}", result.time_over_fp32), result.identical ? "yes" : "NO"});
  print(table.str());
  print_nodes(rows);
  print(
      "\nratio: fp32 bytes / bytes sent. error: squared relative error of the first step's mean, ||m - m'||^2 / "
      "||m||^2.\n");
}

void check_identical(const std::vector<CollectiveRow>& rows) {
  for (const auto& [codec, result] : rows)
    if (!result.identical)
      throw std::runtime_error("verification failed: the ranks hold different results with " + codec);
}

void bench_loopback(const CollectiveOptions& options) {
  Progress progress;
  const std::vector<NamedTensor> tensors = reduce_bench_options(options, options.codecs.front()).tensors;
  const auto ranks = all_gradients(tensors, options.world, &progress);
  const std::vector<float> mean = exact_mean(ranks);
  std::vector<CollectiveRow> rows;
  for (const std::string& codec : options.codecs) {
    rows.push_back({codec, {}});
    run_loopback(options.world, [&](Engine& engine) {
      const size_t rank = static_cast<size_t>(engine.rank());
      const ReduceBenchResult result =
          run_reduce_bench(engine, reduce_bench_options(options, codec), {ranks[rank], mean},
                           [&](const std::string& text) { progress.show(codec + ": " + text); });
      if (rank == 0) rows.back().result = result;
    });
  }
  progress.clear();
  print_rows(options, "loopback", options.world, total_elements(tensors), rows);
  check_identical(rows);
}

void bench_mpi(const CollectiveOptions& options) {
  MpiSession session;
  Engine& engine = session.engine();
  try {
    if (options.world_chosen && options.world != engine.size())
      throw Error(ErrorKind::usage,
                  fmt::format("--world is {}, but mpirun started {} ranks; leave --world out or give the same number",
                              options.world, engine.size()),
                  "world");
    Progress progress;
    Progress* shown = engine.rank() == 0 ? &progress : nullptr;
    const std::vector<NamedTensor> tensors = reduce_bench_options(options, options.codecs.front()).tensors;
    auto ranks = all_gradients(tensors, engine.size(), shown);
    const std::vector<float> mean = exact_mean(ranks);
    const std::vector<float> mine = std::move(ranks[static_cast<size_t>(engine.rank())]);
    ranks = {};
    std::vector<CollectiveRow> rows;
    for (const std::string& codec : options.codecs)
      rows.push_back({codec, run_reduce_bench(engine, reduce_bench_options(options, codec), {mine, mean},
                                              [&](const std::string& text) { progress.show(codec + ": " + text); })});
    progress.clear();
    if (engine.rank() == 0) print_rows(options, "mpi", engine.size(), total_elements(tensors), rows);
    check_identical(rows);
  } catch (const std::exception& error) {
    // Every rank sees the same usage error; one line is enough. Other errors are this rank's own.
    const int code = exit_code_of(error);
    if (engine.rank() == 0 || code != kUsage) print_error(fmt::format("rank {}: {}", engine.rank(), error.what()));
    session.abort(code);
  }
}

void add_nodes(CLI::App& command, std::string& value) {
  const auto check = [](const std::string& text) -> std::string {
    const bool number = !text.empty() && text.size() < 6 && text.find_first_not_of("0123456789") == std::string::npos;
    return number || text == "auto" ? "" : fmt::format("'{}' is not allowed; expected auto or a number", text);
  };
  command
      .add_option(
          "--nodes", value,
          "Two levels: so many nodes of consecutive ranks, or auto, by machine; 0: one level. fp32 then has two "
          "levels, and the codec on one level takes turns with them")
      ->check(check)
      ->type_name("N|auto")
      ->capture_default_str();
}

}  // namespace

void add_bench_collective(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand("collective", "Measure a compressed all-reduce against fp32");
  auto options = std::make_shared<CollectiveOptions>();
  add_codec(*command, options->codecs, "Codec or rules per tensor; may be given several times");
  add_choice(*command, "--engine", options->engine, {"loopback", "mpi"},
             "Ranks are threads of this process (loopback) or the processes of mpirun (mpi)");
  CLI::Option* world = add_whole(*command, "--world", options->world, 1, 1024, "Number of ranks, for loopback");
  add_whole(*command, "--elements", options->elements, 1, kMostElements, "Number of elements of the tensor");
  add_choice(*command, "--list", options->list, {"resnet50"}, "Reduce the tensors of this model instead of one tensor");
  add_nodes(*command, options->nodes);
  add_choice(*command, "--method", options->method, {"gather", "scatter"}, "How the codec's all-reduce is done");
  command
      ->add_option("--down", options->down,
                   "Codec for the second half of scatter; by default that of --codec, rounding to nearest")
      ->type_name("SPEC");
  add_choice(*command, "--residual", options->residual, {"f32", "bf16"}, "Data type of the residuals");
  add_whole(*command, "--steps", options->steps, 1, 1000000, "Number of timed steps; one more runs first to warm up");
  add_whole(*command, "--threads", options->threads, 1, 1024, "CPU threads of each rank");
  command->add_flag("--json", options->json, "Print one JSON object per codec");
  command->footer(
      "Examples:\n"
      "  gradwire bench collective --codec qsgd:bits=4 --world 4 --elements 16777216\n"
      "  mpirun -n 4 gradwire bench collective --engine mpi --codec qsgd:bits=4 --list resnet50\n"
      "  gradwire bench collective --codec qsgd:bits=4 --world 8 --nodes 2");
  command->callback([&action, options, world] {
    options->world_chosen = world->count() > 0;
    for (const std::string& codec : options->codecs) canonical_rules(codec);  // refused before anything is set up
    action = [options] {
      if (options->engine == "mpi") {
        bench_mpi(*options);
      } else {
        bench_loopback(*options);
      }
    };
  });
}

}  // namespace gradwire::app
