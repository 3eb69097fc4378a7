// SPDX-License-Identifier: Apache-2.0
// `gradwire load`: workers that train nothing, to measure a server and its network. Their updates are noise that is
// made once; everything else is what a worker of `gradwire train --server` does.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <thread>

#include "cli/command.h"
#include "cli/console.h"
#include "cli/interrupts.h"
#include "cli/options.h"
#include "collective/timer.h"
#include "core/clock.h"
#include "server/client.h"
#include "server/rpc/dial.h"
#include "server/server_options.h"

namespace gradwire::app {
namespace {

struct LoadOptions {
  server::DialOptions dial{"127.0.0.1:7070", {}};
  server::Signature signature;
  uint64_t elements = 25'000'000, steps = 10;
  int workers = 1;
  double compute_s = 0, patience_s = 60;
  std::string send = "weights";
  bool json = false;
};

// Half of the elements in matrices of a million, the rest in one large one.
std::vector<server::Variable> variables(uint64_t elements) {
  std::vector<server::Variable> list;
  uint64_t left = elements / 2;
  for (int i = 0; left > 0; ++i) {
    const uint64_t count = std::min<uint64_t>(left, uint64_t{1} << 20);
    list.push_back({fmt::format("layer{}.weight", i), {static_cast<int64_t>(count)}});
    left -= count;
  }
  list.push_back({"head.weight", {static_cast<int64_t>(elements - elements / 2)}});
  return list;
}

struct LoadResult {
  double seconds = 0;
  uint64_t steps = 0, up = 0, down = 0;
  ReduceTimes times;
  server::ClientCounts counts;
  bool confirmed = true;  // the server has what was sent last
};

LoadResult work(const LoadOptions& options, int number, const std::atomic<bool>& stop) {
  server::Client client({.signature = options.signature,
                         .dial = server::make_dialer(options.dial),
                         .name = fmt::format("load{}", number),
                         .id = {},
                         .patience_s = options.patience_s,
                         .bench = true});
  std::vector<std::vector<float>> weights, updates;
  std::vector<float*> to;
  std::vector<const float*> from;
  std::mt19937 random(static_cast<unsigned>(number));
  std::normal_distribution<float> noise(0, 1e-3f);
  for (const server::Variable& one : options.signature.parameters) {
    weights.emplace_back(one.count());
    std::vector<float>& update = updates.emplace_back(one.count());
    for (size_t i = 0; i < update.size(); ++i) update[i] = i < 65536 ? noise(random) : update[i % 65536];
    to.push_back(weights.back().data());
    from.push_back(update.data());
  }
  client.join(to);
  const server::ClientCounts before = client.counts();
  const ReduceTimes spent = client.times();
  const auto begin = SteadyClock::now();
  LoadResult result;
  for (; result.steps < options.steps && !stop; ++result.steps) {
    if (options.compute_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(options.compute_s));
    client.exchange(from, to);
  }
  result.seconds = seconds_since(begin);
  result.counts = client.counts();
  result.up = client.counts().messages_up - before.messages_up;
  result.down = client.counts().messages_down - before.messages_down;
  result.times = {client.times().encode - spent.encode, client.times().wait - spent.wait,
                  client.times().decode - spent.decode};
  result.confirmed = client.leave(30);
  return result;
}

void load(LoadOptions& options) {
  const std::atomic<bool>& stop = catch_interrupts();
  options.signature.parameters = variables(options.elements);
  options.signature.sends_updates = options.send == "updates";
  options.signature.model = "load";
  std::fprintf(stderr, "connecting to %s, for at most %g s\n", options.dial.address.c_str(), options.patience_s);
  std::vector<LoadResult> results(static_cast<size_t>(options.workers));
  std::vector<std::thread> threads;
  std::exception_ptr failure;
  std::mutex mutex;
  for (int i = 0; i < options.workers; ++i)
    threads.emplace_back([&, i] {
      try {
        results[static_cast<size_t>(i)] = work(options, i, stop);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
  LoadResult sum;
  for (const LoadResult& one : results) {
    sum.seconds = std::max(sum.seconds, one.seconds);
    sum.steps += one.steps;
    sum.up += one.up;
    sum.down += one.down;
    sum.times += one.times;
    sum.confirmed = sum.confirmed && one.confirmed;
    sum.counts.late += one.counts.late;
    sum.counts.reconnects += one.counts.reconnects;
  }
  const double steps = static_cast<double>(std::max<uint64_t>(1, sum.steps)),
               elements = static_cast<double>(options.elements);
  const nlohmann::json row = {{"workers", options.workers},
                              {"elements", options.elements},
                              {"up", options.signature.up},
                              {"down", options.signature.down},
                              {"send", options.send},
                              {"steps", sum.steps / static_cast<uint64_t>(options.workers)},
                              {"seconds", sum.seconds},
                              {"step_s", sum.seconds * options.workers / steps},
                              {"up_bytes", static_cast<double>(sum.up) / steps},
                              {"down_bytes", static_cast<double>(sum.down) / steps},
                              {"up_of_fp32", static_cast<double>(sum.up) / steps / (4 * elements)},
                              {"down_of_fp32", static_cast<double>(sum.down) / steps / (4 * elements)},
                              {"encode_s", sum.times.encode / steps},
                              {"decode_s", sum.times.decode / steps},
                              {"wait_s", sum.times.wait / steps},
                              {"late", sum.counts.late},
                              {"reconnects", sum.counts.reconnects},
                              {"confirmed", sum.confirmed}};
  if (!sum.confirmed)
    std::fprintf(stderr, "the server did not confirm the last updates of some workers before they left\n");
  if (options.json) return print(row.dump() + "\n");
  print(fmt::format(
      "{} workers, {} elements, {} steps: {} per step; up {} ({:.3f} of fp32), down {} ({:.3f} of fp32); of "
      "a worker's step: encode {}, decode {}, waiting {}\n",
      options.workers, human_count(options.elements), row["steps"].get<uint64_t>(), human_seconds(row["step_s"]),
      human_bytes(row["up_bytes"]), row["up_of_fp32"].get<double>(), human_bytes(row["down_bytes"]),
      row["down_of_fp32"].get<double>(), human_seconds(row["encode_s"]), human_seconds(row["decode_s"]),
      human_seconds(row["wait_s"])));
}

}  // namespace

void add_load(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("load", "Measure a parameter server with workers that train nothing");
  auto options = std::make_shared<LoadOptions>();
  LoadOptions& o = *options;
  command->add_option("--server", o.dial.address, "The address of the server")
      ->type_name("HOST:PORT")
      ->capture_default_str();
  add_whole(*command, "--workers", o.workers, 1, 4096, "The number of workers, which are threads of this process");
  add_whole(*command, "--elements", o.elements, 2, uint64_t{1} << 33, "The number of parameters of the model");
  add_whole(*command, "--steps", o.steps, 1, uint64_t{1} << 40, "How many steps each worker makes");
  command->add_option("--compute", o.compute_s, "How long a worker sleeps before each step, in seconds")
      ->type_name("S")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command->add_option("--patience", o.patience_s, "How long to go on trying to reach the server, in seconds")
      ->type_name("S")
      ->check(CLI::Range(0.1, 1e7))
      ->capture_default_str();
  command->add_option("--up", o.signature.up, "The codec of the updates")->type_name("SPEC")->capture_default_str();
  command->add_option("--down", o.signature.down, "The codec of what comes back")
      ->type_name("SPEC")
      ->capture_default_str();
  add_choice(*command, "--send", o.send, {"weights", "updates"}, "What comes back");
  command->add_flag("--json", o.json, "Print one JSON object");
  add_security(*command, o.dial.security, false);
  command->footer(
      "Example:\n"
      "  gradwire serve --bench --listen 127.0.0.1:7070\n"
      "  gradwire load --server 127.0.0.1:7070 --workers 4 --elements 25000000 --steps 10");
  command->callback([&action, options] { action = [options] { load(*options); }; });
}

}  // namespace gradwire::app
