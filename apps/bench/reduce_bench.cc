// SPDX-License-Identifier: Apache-2.0
// One measured all-reduce: see reduce_bench.h. Byte counts and hashes are exchanged through the same engine, outside of
// what is timed and counted.
#include "bench/reduce_bench.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <optional>
#include <set>

#include "bench/measure.h"
#include "bench/synthetic.h"
#include "core/check.h"
#include "engine/counting_engine.h"

namespace gradwire::app {
namespace {

std::vector<uint64_t> gather_numbers(Engine& engine, uint64_t mine) {
  std::vector<uint64_t> all(static_cast<size_t>(engine.size()));
  std::vector<Bytes> slots;
  for (uint64_t& number : all) slots.push_back(std::as_writable_bytes(std::span(&number, 1)));
  engine.all_gather(std::as_bytes(std::span(&mine, 1)), slots).wait();
  return all;
}

uint64_t sum_of(const std::vector<uint64_t>& numbers) {
  uint64_t sum = 0;
  for (uint64_t number : numbers) sum += number;
  return sum;
}

uint64_t mean_of(const std::vector<uint64_t>& numbers) { return sum_of(numbers) / numbers.size(); }

// Where each rank runs, by ReduceOptions::nodes. What it makes no sense of is left to the reducer.
std::vector<int> nodes_of_ranks(Engine& engine, int nodes) {
  std::vector<int> all;
  if (nodes == ReduceOptions::kAutoNodes)
    for (uint64_t node : gather_numbers(engine, static_cast<uint64_t>(engine.node())))
      all.push_back(static_cast<int>(node));
  else
    for (int rank = 0; rank < engine.size(); ++rank)
      all.push_back(nodes > 0 && engine.size() % nodes == 0 ? rank / (engine.size() / nodes) : rank);
  return all;
}

// One of the reducers that take turns, with its result and what was measured.
class Contender {
 public:
  Contender(CountingEngine& engine, const ReduceBenchOptions& options, const ReduceOptions& reduce,
            const ReduceBenchData& data)
      : engine_(engine), reducer_(engine, options.tensors, reduce), result_(data.mine.size()) {
    uint64_t at = 0;
    for (const NamedTensor& tensor : options.tensors) {
      in_.push_back(data.mine.data() + at);
      out_.push_back(result_.data() + at);
      at += tensor.count;
    }
  }
  double step(uint64_t number) {
    engine_.barrier().wait();
    const uint64_t sent = engine_.bytes_sent(), left = engine_.bytes_left_node();
    const double start = seconds_now();
    reducer_.run(number, in_, out_);
    bytes_ = engine_.bytes_sent() - sent;
    left_node_ = engine_.bytes_left_node() - left;
    engine_.barrier().wait();
    const double seconds = seconds_now() - start;
    return seconds;
  }
  uint64_t bytes() const { return bytes_; }
  uint64_t left_node() const { return left_node_; }
  std::span<const float> result() const { return result_; }

 private:
  CountingEngine& engine_;
  Reducer reducer_;
  std::vector<float> result_;
  std::vector<const void*> in_;
  std::vector<void*> out_;
  uint64_t bytes_ = 0, left_node_ = 0;
};

}  // namespace

ReduceBenchResult run_reduce_bench(Engine& uncounted, const ReduceBenchOptions& options, const ReduceBenchData& data,
                                   const std::function<void(const std::string&)>& report) {
  GW_CHECK(data.mine.size() == data.mean.size());
  const std::vector<int> nodes = nodes_of_ranks(uncounted, options.reduce.nodes);
  CountingEngine engine(uncounted, nodes);
  ReduceOptions plain = options.reduce, flat = options.reduce;
  flat.nodes = 0;
  plain.up = "fp32";
  plain.down = "fp32";
  plain.method = ReduceOptions::Method::scatter;
  Contender codec(engine, options, options.reduce, data);
  Contender fp32(engine, options, plain, data);
  std::optional<Contender> one_level;
  if (options.reduce.nodes != 0) one_level.emplace(engine, options, flat, data);
  // The first step of each contender touches its memory for the first time. It is checked but not timed.
  ReduceBenchResult result;
  result.nodes = one_level ? static_cast<int>(std::set<int>(nodes.begin(), nodes.end()).size()) : 0;
  const auto per_node = [&](const Contender& one) {
    return sum_of(gather_numbers(engine, one.left_node())) / static_cast<uint64_t>(result.nodes);
  };
  std::vector<double> times, fp32_times, quotients, flat_times, flat_quotients;
  for (int step = 0; step <= options.steps; ++step) {
    if (report && engine.rank() == 0) report(fmt::format("step {} of {}", step, options.steps));
    const uint64_t number = static_cast<uint64_t>(step);
    const double fp32_time = fp32.step(number);
    const double time = codec.step(number), flat_time = one_level ? one_level->step(number) : 0;
    const std::span<const float> reduced = codec.result();
    const std::vector<uint64_t> hashes = gather_numbers(engine, XXH3_64bits(reduced.data(), reduced.size_bytes()));
    result.identical &= std::all_of(hashes.begin(), hashes.end(), [&](uint64_t hash) { return hash == hashes[0]; });
    if (step == 0) {
      result.error = squared_relative_error(data.mean, reduced);
      result.bytes_sent = mean_of(gather_numbers(engine, codec.bytes()));
      result.bytes_sent_fp32 = mean_of(gather_numbers(engine, fp32.bytes()));
      if (one_level) {
        result.node_bytes = per_node(codec);
        result.node_bytes_fp32 = per_node(fp32);
        result.node_bytes_one_level = per_node(*one_level);
      }
      continue;
    }
    times.push_back(time);
    fp32_times.push_back(fp32_time);
    quotients.push_back(time / fp32_time);
    if (!one_level) continue;
    flat_times.push_back(flat_time);
    flat_quotients.push_back(time / flat_time);
  }
  result.time_s = median(times);
  result.fp32_time_s = median(fp32_times);
  result.time_over_fp32 = median(quotients);
  if (one_level) {
    result.one_level_time_s = median(flat_times);
    result.time_over_one_level = median(flat_quotients);
  }
  return result;
}

std::vector<float> exact_mean(const std::vector<std::vector<float>>& ranks) {
  std::vector<float> mean(ranks.front().size());
  for (size_t i = 0; i < mean.size(); ++i) {
    double sum = 0;
    for (const std::vector<float>& rank : ranks) sum += rank[i];
    mean[i] = static_cast<float>(sum / static_cast<double>(ranks.size()));
  }
  return mean;
}

}  // namespace gradwire::app
