// SPDX-License-Identifier: Apache-2.0
// One measured all-reduce: see reduce_bench.h. Byte counts and hashes are exchanged through the same engine, outside of
// what is timed and counted.
#include "bench/reduce_bench.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>

#include "bench/measure.h"
#include "bench/synthetic.h"
#include "core/check.h"

namespace gradwire::app {
namespace {

std::vector<uint64_t> gather_numbers(Engine& engine, uint64_t mine) {
  std::vector<uint64_t> all(static_cast<size_t>(engine.size()));
  std::vector<Bytes> slots;
  for (uint64_t& number : all) slots.push_back(std::as_writable_bytes(std::span(&number, 1)));
  engine.all_gather(std::as_bytes(std::span(&mine, 1)), slots).wait();
  return all;
}

uint64_t mean_of(const std::vector<uint64_t>& numbers) {
  uint64_t sum = 0;
  for (uint64_t number : numbers) sum += number;
  return sum / numbers.size();
}

// One of the two reducers that take turns, with its result and what was measured.
class Contender {
 public:
  Contender(Engine& engine, const ReduceBenchOptions& options, const ReduceOptions& reduce, const ReduceBenchData& data)
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
    const uint64_t sent = engine_.bytes_sent();
    const double start = seconds_now();
    reducer_.run(number, in_, out_);
    bytes_ = engine_.bytes_sent() - sent;
    engine_.barrier().wait();
    const double seconds = seconds_now() - start;
    return seconds;
  }
  uint64_t bytes() const { return bytes_; }
  std::span<const float> result() const { return result_; }

 private:
  Engine& engine_;
  Reducer reducer_;
  std::vector<float> result_;
  std::vector<const void*> in_;
  std::vector<void*> out_;
  uint64_t bytes_ = 0;
};

}  // namespace

ReduceBenchResult run_reduce_bench(Engine& engine, const ReduceBenchOptions& options, const ReduceBenchData& data,
                                   const std::function<void(const std::string&)>& report) {
  GW_CHECK(data.mine.size() == data.mean.size());
  ReduceOptions plain = options.reduce;
  plain.up = "fp32";
  plain.down = "fp32";
  plain.method = ReduceOptions::Method::scatter;
  Contender codec(engine, options, options.reduce, data);
  Contender fp32(engine, options, plain, data);
  // The first step of each contender touches its memory for the first time. It is checked but not timed.
  ReduceBenchResult result;
  std::vector<double> times, fp32_times, quotients;
  for (int step = 0; step <= options.steps; ++step) {
    if (report && engine.rank() == 0) report(fmt::format("step {} of {}", step, options.steps));
    const uint64_t number = static_cast<uint64_t>(step);
    const double fp32_time = fp32.step(number);
    const double time = codec.step(number);
    const std::span<const float> reduced = codec.result();
    const std::vector<uint64_t> hashes = gather_numbers(engine, XXH3_64bits(reduced.data(), reduced.size_bytes()));
    result.identical &= std::all_of(hashes.begin(), hashes.end(), [&](uint64_t hash) { return hash == hashes[0]; });
    if (step == 0) {
      result.error = squared_relative_error(data.mean, reduced);
      result.bytes_sent = mean_of(gather_numbers(engine, codec.bytes()));
      result.bytes_sent_fp32 = mean_of(gather_numbers(engine, fp32.bytes()));
      continue;
    }
    times.push_back(time);
    fp32_times.push_back(fp32_time);
    quotients.push_back(time / fp32_time);
  }
  result.time_s = median(times);
  result.fp32_time_s = median(fp32_times);
  result.time_over_fp32 = median(quotients);
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
