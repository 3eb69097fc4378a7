// SPDX-License-Identifier: Apache-2.0
// `gradwire bench codec`: how fast a codec encodes, encodes with error feedback and decodes, next to a plain copy of
// the same tensor. The result is verified first; then every round times copy, encode, copy, feedback, copy, decode, so
// that each is compared with a copy made moments before, and medians over rounds are reported.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/bench_case.h"
#include "bench/break_even.h"
#include "bench/resnet50.h"
#include "bench/synthetic.h"
#include "cli/command.h"
#include "cli/console.h"
#include "cli/options.h"
#include "gradwire/learn.h"

namespace gradwire::app {
namespace {

struct CodecBenchOptions {
  std::vector<std::string> codecs = {"all"};
  uint64_t elements = 16777216;
  std::string dtype = "f32", residual = "f32", list;
  int pairs = 15, world = 4;
  BackendOptions backend;
  bool json = false;
};

// One operation: its times, and its speed relative to the neighbouring copy and to the single tensor.
struct Timed {
  std::vector<double> seconds, of_copy, of_single;
};

struct CodecBenchResult {
  double bits_per_element, error;
  double copy_seconds;
  Timed encode, feedback, decode;
  uint64_t tensor_bytes, residual_bytes, frame_bytes;
};

// A codec cannot move bytes faster than a copy does. A share beyond this is no speed but a copy that was disturbed.
constexpr double kPossible = 1.1;

// A small tensor is processed several times within one measurement.
uint64_t repeats(uint64_t elements) { return std::clamp<uint64_t>((uint64_t{1} << 20) / elements, 1, 64); }

CodecBenchResult measure(BenchBackend& backend, const std::string& spec, const CodecBenchOptions& options,
                         const std::vector<NamedTensor>& tensors, std::span<const float> values, Progress& progress) {
  // A codec that learns is fitted first, as it would be during training.
  const Codec codec = fit(Codec::parse(spec), values.data(), std::min<uint64_t>(values.size(), 1 << 20), DType::f32);
  const BenchCaseOptions case_options{codec, parse_dtype(options.dtype), parse_dtype(options.residual)};
  progress.show(spec + ": verifying against the scalar reference");
  verify_against_reference(backend, case_options, values);

  const uint64_t elements = values.size();
  const size_t sets = std::clamp<size_t>((4 * backend.cache_bytes() + 4 * elements - 1) / (4 * elements), 1, 16);
  BenchCase bench_case(backend, tensors, case_options, values, sets);
  std::optional<BenchCase> single;
  if (!options.list.empty())
    single.emplace(backend, std::vector<NamedTensor>{{"single", elements, DType::f32, 2}}, case_options, values, sets);

  CodecBenchResult result{};
  result.tensor_bytes = bench_case.tensor_bytes();
  result.residual_bytes = bench_case.residual_bytes();
  result.frame_bytes = bench_case.frame_bytes();
  result.bits_per_element = 8.0 * static_cast<double>(result.frame_bytes) / static_cast<double>(elements);
  bench_case.encode(0);
  bench_case.decode(0);
  bench_case.wait();
  result.error = squared_relative_error(bench_case.input(), bench_case.decoded());
  const bool lossless = case_options.codec.traits().lossless;
  if (!std::isfinite(result.error) || (lossless && result.error != 0))
    throw std::runtime_error(fmt::format("verification failed: the error of {} is {}; expected {}", spec, result.error,
                                         lossless ? "0, because it is lossless" : "a finite number"));

  std::vector<double> copies;
  const uint64_t count = repeats(elements);
  uint64_t turn = 0;
  const auto time = [&](BenchCase& what, void (BenchCase::*work)(uint64_t)) {
    const uint64_t first = turn;
    turn += count;
    const double seconds = backend.time([&] {
      for (uint64_t i = first; i < first + count; ++i) (what.*work)(i);
    });
    what.wait();
    return seconds / static_cast<double>(count);
  };
  const auto pair = [&](Timed& timed, void (BenchCase::*work)(uint64_t)) {
    const double copy = time(bench_case, &BenchCase::copy);
    const double own = time(bench_case, work);
    copies.push_back(copy);
    timed.seconds.push_back(own);
    timed.of_copy.push_back(copy / own);
    if (single) timed.of_single.push_back(time(*single, work) / own);
  };
  for (int round = -1; round < options.pairs; ++round) {
    if (round == 0) {  // the first round only warmed up
      copies.clear();
      result.encode = result.feedback = result.decode = {};
    }
    progress.show(fmt::format("{}: round {} of {}", spec, round + 1, options.pairs));
    pair(result.encode, &BenchCase::encode);
    pair(result.feedback, &BenchCase::feedback);
    pair(result.decode, &BenchCase::decode);
  }
  result.copy_seconds = median(copies);
  return result;
}

// The time in which a copy would move `bytes` (read or written), over the time taken.
double limit_fraction(const CodecBenchResult& result, const Timed& timed, uint64_t bytes) {
  return median(timed.of_copy) * static_cast<double>(bytes) / (2.0 * static_cast<double>(result.tensor_bytes));
}

CodecCost cost_of(const std::string& spec, const CodecBenchResult& result) {
  const Timed& first = Codec::parse(spec).traits().feedback ? result.feedback : result.encode;
  return {.bytes = static_cast<double>(result.frame_bytes),
          .first_encode = median(first.seconds),
          .encode = median(result.encode.seconds),
          .decode = median(result.decode.seconds)};
}

nlohmann::ordered_json json_of(const std::optional<double>& gbps) {
  return gbps ? nlohmann::ordered_json(*gbps) : nlohmann::ordered_json(nullptr);
}

nlohmann::ordered_json to_json(const std::string& spec, const CodecBenchOptions& options, uint64_t elements,
                               const CodecBenchResult& result, const CodecCost& bf16) {
  const double fp32_bytes = 4.0 * static_cast<double>(elements);
  const auto rate = [&](const Timed& timed) { return fp32_bytes / median(timed.seconds) * 1e-9; };
  const uint64_t one_way = result.tensor_bytes + result.frame_bytes;
  const double encode_limit = limit_fraction(result, result.encode, one_way),
               feedback_limit = limit_fraction(result, result.feedback, one_way + 2 * result.residual_bytes),
               decode_limit = limit_fraction(result, result.decode, one_way);
  nlohmann::ordered_json row = {
      {"codec", spec},
      {"device", options.backend.device},
      {"threads", options.backend.device == "cpu" ? options.backend.threads : 0},
      {"dtype", options.dtype},
      {"elements", elements},
      {"bits_per_element", result.bits_per_element},
      {"ratio", fp32_bytes / static_cast<double>(result.frame_bytes)},
      {"error", result.error},
      {"encode_GBps", rate(result.encode)},
      {"feedback_encode_GBps", rate(result.feedback)},
      {"decode_GBps", rate(result.decode)},
      {"copy_GBps", 2.0 * static_cast<double>(result.tensor_bytes) / result.copy_seconds * 1e-9},
      {"limit_fraction_encode", encode_limit},
      {"limit_fraction_feedback", feedback_limit},
      {"limit_fraction_decode", decode_limit},
      {"encode_of_copy", median(result.encode.of_copy)},
      {"feedback_of_copy", median(result.feedback.of_copy)},
      {"decode_of_copy", median(result.decode.of_copy)}};
  if (!options.list.empty()) {
    row["list"] = options.list;
    row["encode_list_over_single"] = median(result.encode.of_single);
    row["feedback_list_over_single"] = median(result.feedback.of_single);
    row["decode_list_over_single"] = median(result.decode.of_single);
  }
  const CodecCost own = cost_of(spec, result);
  row["world"] = options.world;
  row["break_even_Gbps"] = json_of(break_even_gbps(own, {.bytes = fp32_bytes}, options.world));
  row["break_even_bf16_Gbps"] = json_of(break_even_gbps(own, bf16, options.world));
  row["residual"] = options.residual;
  row["pairs"] = options.pairs;
  row["encode_spread"] = spread(result.encode.seconds);
  row["feedback_spread"] = spread(result.feedback.seconds);
  row["decode_spread"] = spread(result.decode.seconds);
  row["plausible"] = std::max({encode_limit, feedback_limit, decode_limit}) <= kPossible;
  row["spec"] = Codec::parse(spec).str();
  return row;
}

void print_page(const CodecBenchOptions& options, uint64_t elements, const std::vector<nlohmann::ordered_json>& rows) {
  print(fmt::format("{} {} elements{} on {}; verified; medians of {} interleaved rounds\n\n", human_count(elements),
                    options.dtype, options.list.empty() ? "" : " (" + options.list + " list)",
                    options.backend.device == "cuda" ? "the GPU"
                                                     : fmt::format("the CPU, {} thread{}", options.backend.threads,
                                                                   options.backend.threads == 1 ? "" : "s"),
                    options.pairs));
  std::vector<std::string> header = {"codec",        "bits/element", "ratio",    "error",        "encode",
                                     "feedback",     "decode",       "copy",     "encode/limit", "feedback/limit",
                                     "decode/limit", "pays/fp32",    "pays/bf16"};
  std::string alignment = "lrrrrrrrrrrrr";
  if (!options.list.empty()) {
    header.insert(header.end(), {"encode/single", "decode/single"});
    alignment += "rr";
  }
  ConsoleTable table(alignment, header);
  bool impossible = false;
  for (const auto& row : rows) {
    const auto number = [&](const char* name, const char* format) {
      return fmt::format(fmt::runtime(format), row.at(name).get<double>());
    };
    // A speed with how far its rounds lie apart.
    const auto speed = [&](const char* name, const char* spread_name) {
      return fmt::format("{} +-{:.0f}%", number(name, "{:.2f}"), 50 * row.at(spread_name).get<double>());
    };
    const auto limit = [&](const char* name) {
      const bool possible = row.at(name).get<double>() <= kPossible;
      impossible |= !possible;
      return number(name, "{:.2f}") + (possible ? "" : " (?)");
    };
    const auto pays = [&](const char* name) {
      if (row.at(name).is_null()) return std::string("always");
      const double gbps = row.at(name).get<double>();
      return gbps > 0 ? fmt::format("{:.3g}", gbps) : std::string("never");
    };
    std::vector<std::string> cells = {row.at("codec").get<std::string>(),
                                      number("bits_per_element", "{:.3f}"),
                                      number("ratio", "{:.2f}"),
                                      human_fraction(row.at("error").get<double>()),
                                      speed("encode_GBps", "encode_spread"),
                                      speed("feedback_encode_GBps", "feedback_spread"),
                                      speed("decode_GBps", "decode_spread"),
                                      number("copy_GBps", "{:.2f}"),
                                      limit("limit_fraction_encode"),
                                      limit("limit_fraction_feedback"),
                                      limit("limit_fraction_decode"),
                                      pays("break_even_Gbps"),
                                      pays("break_even_bf16_Gbps")};
    if (!options.list.empty()) {
      cells.push_back(number("encode_list_over_single", "{:.2f}"));
      cells.push_back(number("decode_list_over_single", "{:.2f}"));
    }
    table.row(cells);
  }
  print(table.str());
  print(
      "\nratio: fp32 bytes / bytes of the message. error: ||x - x'||^2 / ||x||^2; an unbiased codec with few bits may "
      "exceed 1.\n"
      "encode, feedback (encode with error feedback), decode: GB of fp32 tensor per second, with half of the range "
      "from "
      "the\n"
      "first to the third quartile of the rounds. copy: GB/s read + written.\n"
      "pays/fp32, pays/bf16: Gb/s of a link below which the codec is faster than fp32 or a bf16 cast, by these rates, "
      "in an\n"
      "all-reduce of --world ranks that does not overlap with anything.\n"
      "/limit: share of the speed at which a plain copy moves the same bytes; 1.00 is the memory limit. "
      "docs/measuring.md\n"
      "defines all figures.\n");
  if (impossible)
    print(
        "(?): no codec is faster than the memory limit. The machine was busy while the copy was timed; measure again "
        "with more\n"
        "--pairs, or with nothing else running.\n");
  if (!options.list.empty())
    print("/single: speed of the whole list in one call / speed of one tensor of the same size.\n");
}

void bench_codec(const CodecBenchOptions& options) {
  const std::vector<NamedTensor> tensors =
      options.list.empty() ? std::vector<NamedTensor>{{"tensor", options.elements, DType::f32, 2}} : resnet50_tensors();
  const uint64_t elements = total_elements(tensors);
  Progress progress;
  progress.show("making a gradient");
  std::vector<float> values(elements);
  fill_gradient(values, 1, machine_threads());
  std::vector<nlohmann::ordered_json> rows;
  const CodecCost bf16 =
      cost_of("bf16", measure(*make_backend(options.backend), "bf16", options, tensors, values, progress));
  for (const std::string& spec : options.codecs) {
    const std::unique_ptr<BenchBackend> backend = make_backend(options.backend);
    const CodecBenchResult result = measure(*backend, spec, options, tensors, values, progress);
    rows.push_back(to_json(spec, options, elements, result, bf16));
    if (options.json) {
      progress.clear();
      print(rows.back().dump() + "\n");
    }
  }
  progress.clear();
  if (!options.json) print_page(options, elements, rows);
}

}  // namespace

void add_bench_codec(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand("codec", "Measure speed, size and error of codecs next to a plain copy");
  auto options = std::make_shared<CodecBenchOptions>();
  add_codec(*command, options->codecs, "Codec with parameters, or 'all'; may be given several times");
  add_whole(*command, "--elements", options->elements, 1, kMostElements, "Number of elements of the tensor");
  add_choice(*command, "--list", options->list, {"resnet50"},
             "Time the tensors of this model in one call, and one tensor of the same size");
  add_whole(*command, "--world", options->world, 2, 1 << 20, "Number of ranks for which the break-even is computed");
  add_choice(*command, "--dtype", options->dtype, {"f32", "f16", "bf16"}, "Type of the tensor");
  add_choice(*command, "--residual", options->residual, {"f32", "bf16"}, "Type of the residual");
  add_whole(*command, "--pairs", options->pairs, 1, 100000, "Number of timed rounds; one more runs first to warm up");
  add_device(*command, options->backend);
  command->add_flag("--json", options->json, "Print one JSON object per codec");
  command->footer("Example:\n  gradwire bench codec --codec qsgd:bits=4 --elements 16777216 --device cpu --threads 1");
  command->callback([&action, options] {
    std::vector<std::string> specs;
    for (const std::string& spec : options->codecs) {
      if (spec == "all") {
        for (const CodecInfo& info : codecs()) specs.push_back(info.name);
      } else {
        Codec::parse(spec);
        specs.push_back(spec);
      }
    }
    options->codecs = specs;
    action = [options] { bench_codec(*options); };
  });
}

}  // namespace gradwire::app
