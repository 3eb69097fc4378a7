// SPDX-License-Identifier: Apache-2.0
#include "core/machine.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>

namespace gradwire {
namespace {

uint64_t number_in(const char* path) {  // 0: there is none, or it is "max"
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : 0;
}

}  // namespace

uint64_t machine_memory() {
  const long pages = ::sysconf(_SC_PHYS_PAGES), size = ::sysconf(_SC_PAGESIZE);
  uint64_t bytes = pages > 0 && size > 0 ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(size)
                                         : std::numeric_limits<uint64_t>::max();
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"})
    if (const uint64_t limit = number_in(path)) bytes = std::min(bytes, limit);
  return bytes;
}

}  // namespace gradwire
