// SPDX-License-Identifier: Apache-2.0
#include "server/machine.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "core/machine.h"

namespace gradwire::server {
namespace {

// A little later than the start of the process, and the same for all who ask.
const double kStart = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();

}  // namespace

uint64_t resident_memory() {
  std::ifstream file("/proc/self/statm");
  uint64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<uint64_t>(std::max(0L, ::sysconf(_SC_PAGESIZE)));
}

uint64_t open_files() {
  DIR* folder = ::opendir("/proc/self/fd");
  if (!folder) return 0;
  uint64_t count = 0;
  while (const dirent* entry = ::readdir(folder)) count += entry->d_name[0] != '.';
  ::closedir(folder);
  return count > 0 ? count - 1 : 0;  // the folder itself
}

uint64_t file_limit() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 1024;
}

double process_start() { return kStart; }

uint64_t default_max_elements() { return std::max<uint64_t>(1, machine_memory() / 4 / (2 * sizeof(float))); }

}  // namespace gradwire::server
