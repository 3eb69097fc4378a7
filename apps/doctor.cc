// SPDX-License-Identifier: Apache-2.0
// `gradwire doctor`: what this build and this machine can do, what is missing, and the line that would get it.
#include <fmt/format.h>
#include <stdio.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"
#include "console.h"
#include "packed.h"
#include "gradwire/engine.h"
#include "gradwire/runner.h"
#include "measure.h"
#include "mpi_session.h"

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

// The version of torch that python3 imports; empty if there is none. Bounded: a broken installation may hang.
std::string torch_version() {
  FILE* pipe = popen("timeout 30 python3 -c 'import torch; print(torch.__version__)' 2>/dev/null", "r");
  if (pipe == nullptr) return {};
  char line[128] = {};
  const bool read = fgets(line, sizeof(line), pipe) != nullptr;
  const int status = pclose(pipe);
  std::string version = read && status == 0 ? line : "";
  while (!version.empty() && version.back() == '\n') version.pop_back();
  return version;
}

struct Missing {
  std::string what, line;
};

void doctor(bool json) {
  Progress progress;
  progress.show("looking for torch ...");
  const std::string torch = torch_version();
  progress.clear();
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
  if (torch.empty()) missing.push_back({"torch (not needed yet)", "pip install torch"});

  if (json) {
    nlohmann::ordered_json row = {{"version", GRADWIRE_VERSION},
                                  {"cpu", processor()},
                                  {"cores", machine_threads()},
                                  {"simd_targets", simd},
                                  {"simd_chosen", chosen},
                                  {"cuda_built", cuda_built()},
                                  {"cuda_devices", gpus},
                                  {"cuda", cuda_description()},
                                  {"mpi_built", mpi_built()},
                                  {"mpi", mpi_library()},
                                  {"torch", torch}};
    row["engines"] = mpi_built() ? std::vector<std::string>{"loopback", "mpi"} : std::vector<std::string>{"loopback"};
    row["missing"] = nlohmann::ordered_json::array();
    for (const Missing& item : missing) row["missing"].push_back({{"what", item.what}, {"line", item.line}});
    print(row.dump() + "\n");
    return;
  }
  const auto line = [](const char* name, const std::string& value) { print(fmt::format("{:<10}{}\n", name, value)); };
  line("gradwire", GRADWIRE_VERSION);
  line("CPU", fmt::format("{}, {} core{} usable", processor(), machine_threads(), machine_threads() == 1 ? "" : "s"));
  std::string targets;
  for (const std::string& target : simd) targets += (targets.empty() ? "" : ", ") + target;
  line("SIMD", simd.empty() ? "scalar only" : fmt::format("{} is used; usable here: {}, scalar", chosen, targets));
  line("CUDA", cuda_description());
  line("MPI", mpi_built() ? mpi_library() : "not in this build");
  line("engines", mpi_built() ? "loopback, mpi" : "loopback");
  line("files", packing_built() ? "plain and packed (Zstandard)" : "plain; packed ones need Zstandard, which this build did not find");
  line("torch", torch.empty() ? "not found by python3 (not needed yet)" : torch + " found by python3 (not needed yet)");
  if (missing.empty()) return print("\nNothing is missing.\n");
  print("\nMissing, and how to get it:\n");
  for (const Missing& item : missing) print(fmt::format("  {}: {}\n", item.what, item.line));
}

}  // namespace

void add_doctor(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("doctor", "Show what this build and this machine can do, and what is missing");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "One JSON object");
  command->footer("Example:\n  gradwire doctor");
  command->callback([&action, json] { action = [json] { doctor(*json); }; });
}

}  // namespace gradwire::app
