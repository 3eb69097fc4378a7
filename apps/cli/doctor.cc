// SPDX-License-Identifier: Apache-2.0
// `gradwire doctor`: what this build and this machine can do, what is missing, and how to get it.
#include <fmt/format.h>
#include <stdio.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/measure.h"
#include "cli/command.h"
#include "cli/console.h"
#include "cli/mpi_session.h"
#include "cli/version.h"
#include "codec/packed.h"
#include "gradwire/engine.h"
#include "gradwire/runner.h"

namespace gradwire::app {
namespace {

std::string processor() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

// The engine works with every thread level, but not equally well.
std::string mpi_description() {
  if (!mpi_built()) return "not in this build";
  const std::string level = mpi_thread_level();
  if (level.empty()) return mpi_library();
  if (level == "MPI_THREAD_MULTIPLE")
    return mpi_library() + " with " + level + ": a thread of the engine moves bytes while the program computes";
  return mpi_library() + " with at most " + level + ": bytes move only inside calls of the engine, which is slower";
}

struct Missing {
  std::string what, line;
};

void doctor(bool json) {
  const std::string torch = GRADWIRE_TORCH_VERSION;
  const std::vector<std::string> simd = simd_targets();
  const std::string chosen = simd.empty() ? "scalar" : simd.front();
  const int gpus = cuda_devices();

  std::vector<Missing> missing;
  if (!cuda_built())
    missing.push_back(
        {"CUDA drivers in this build", "install the CUDA toolkit so that nvcc is on the PATH, then: make build"});
  else if (gpus == 0)
    missing.push_back(
        {"a usable GPU", "install the NVIDIA driver (nvidia-smi must list the GPU); no rebuild is needed"});
  if (!mpi_built())
    missing.push_back({"MPI in this build", "apt-get install libopenmpi-dev openmpi-bin, then: make build"});
  if (torch.empty())
    missing.push_back(
        {"gradwire train and compare", "install torch for python3 (pip install torch), then: make build"});
#ifdef GRADWIRE_HAS_GRPC
  const bool serves = true;
#else
  const bool serves = false;
#endif
  if (!serves) missing.push_back({"the parameter server", "apt-get install libgrpc++-dev, then: make build"});

  if (json) {
    nlohmann::ordered_json row = {{"version", version_text()},
                                  {"cpu", processor()},
                                  {"cores", machine_threads()},
                                  {"simd_targets", simd},
                                  {"simd_chosen", chosen},
                                  {"cuda_built", cuda_built()},
                                  {"cuda_devices", gpus},
                                  {"cuda", cuda_description()},
                                  {"mpi_built", mpi_built()},
                                  {"mpi", mpi_library()},
                                  {"mpi_thread_level", mpi_thread_level()},
                                  {"torch", torch},
                                  {"server", serves}};
    row["engines"] = mpi_built() ? std::vector<std::string>{"loopback", "mpi"} : std::vector<std::string>{"loopback"};
    row["missing"] = nlohmann::ordered_json::array();
    for (const Missing& item : missing) row["missing"].push_back({{"what", item.what}, {"line", item.line}});
    print(row.dump() + "\n");
    return;
  }
  const auto line = [](const char* name, const std::string& value) { print(fmt::format("{:<10}{}\n", name, value)); };
  line("gradwire", version_text());
  line("CPU", fmt::format("{}, {} core{} usable", processor(), machine_threads(), machine_threads() == 1 ? "" : "s"));
  std::string targets;
  for (const std::string& target : simd) targets += (targets.empty() ? "" : ", ") + target;
  line("SIMD", simd.empty() ? "scalar only" : fmt::format("{} is used; usable here: {}, scalar", chosen, targets));
  line("CUDA", cuda_description());
  line("MPI", mpi_description());
  line("engines", mpi_built() ? "loopback, mpi" : "loopback");
  line("files", packing_built() ? "plain and packed (Zstandard)"
                                : "plain; packed ones need Zstandard, which this build did not find");
  line("torch", torch.empty() ? "not in this build" : torch + ", for gradwire train and compare");
  line("server", serves ? "gradwire serve, status and load, over gRPC" : "not in this build");
  if (missing.empty()) return print("\nNothing is missing.\n");
  print("\nMissing, and how to get it:\n");
  for (const Missing& item : missing) print(fmt::format("  {}: {}\n", item.what, item.line));
}

}  // namespace

void add_doctor(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("doctor", "Show what this build and this machine can do, and what is missing");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print one JSON object");
  command->footer("Example:\n  gradwire doctor");
  command->callback([&action, json] { action = [json] { doctor(*json); }; });
}

}  // namespace gradwire::app
