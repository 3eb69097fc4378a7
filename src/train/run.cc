// SPDX-License-Identifier: Apache-2.0
#include "train/run.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include <cstdlib>
#include <fstream>
#include <thread>

#include "gradwire/error.h"
#include "train/warm_up.h"
#include "train/worker.h"

namespace gradwire::train {
namespace {

int cores() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

void check_device(const Settings& settings) {
  if (settings.device != "cuda") return;
  const char* missing = !torch::cuda::is_available() ? "this torch sees no GPU"
                        : cuda_devices() == 0        ? "this build has no CUDA codecs, or no GPU"
                                                     : nullptr;
  if (missing)
    throw Error(ErrorKind::unsupported, fmt::format("--device cuda: {}; see gradwire doctor", missing), "device");
}

void check_timeout(double seconds) {
  constexpr double kYear = 365.0 * 24 * 3600;
  if (!(seconds >= 0.001 && seconds <= kYear))
    throw Error(ErrorKind::usage, fmt::format("timeout is {} s; allowed is 0.001 s to one year", seconds), "timeout");
}

// Workers that send updates of their own have no mean gradient to compare with.
void check_meter(const TrainingJob& job) {
  if (job.settings.optimizer == "qadam" && job.places.meter_every > 0)
    throw Error(ErrorKind::usage, "meter-every is given; allowed is any optimizer but qadam, which sends no gradients",
                "meter-every");
}

void set_determinism(bool deterministic) {
  at::globalContext().setBenchmarkCuDNN(!deterministic);
  at::globalContext().setDeterministicCuDNN(deterministic);
  at::globalContext().setDeterministicAlgorithms(deterministic, false);
  if (deterministic) setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);
}

uint64_t peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
}

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr(std::min(line.size(), line.find(':') + 2));
  return "processor";
}

// In words, for records.
std::string machine() {
  return fmt::format("{} x {}{}, torch {}", cores(), processor(),
                     torch::cuda::is_available() ? ", " + cuda_description() : "", TORCH_VERSION);
}

}  // namespace

nlohmann::json run(const TrainingJob& job, Engine* engine) {
  const Settings& settings = job.settings;
  settings.check();
  check_timeout(job.places.timeout);
  check_device(settings);
  check_meter(job);
  set_determinism(settings.deterministic);
  if (engine && engine->size() != settings.workers)
    throw Error(ErrorKind::usage,
                fmt::format("workers is {}; {} processes were started", settings.workers, engine->size()), "workers");
  // Workers in other processes have the machine to themselves as far as one can know: one thread each unless told.
  const int threads = settings.threads > 0          ? settings.threads
                      : engine || job.places.server ? 1
                                                    : std::max(1, cores() / settings.workers);

  warm_up(job);
  nlohmann::json record;
  const auto work = [&](Engine& own) {
    at::set_num_threads(threads);
    nlohmann::json result = Worker(own, job).train();
    if (own.rank() == 0) record = std::move(result);
  };
  if (engine)
    work(*engine);
  else
    run_loopback(job.places.server ? 1 : settings.workers, work);
  if (!record.is_null()) {
    record["machine"] = machine();
    record["memory"]["peak"] = peak_bytes();
    nlohmann::json event = record;
    event["event"] = "end";
    if (job.listener) job.listener(event);
  }
  return record;
}

}  // namespace gradwire::train
