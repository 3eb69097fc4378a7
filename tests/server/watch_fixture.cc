// SPDX-License-Identifier: Apache-2.0
// A Watch without a server: serves what it reads. Every line of standard input is a status (JSON) and replaces the one
// before; the end of the input ends the program. The first is read before it listens, so that no client sees an empty
// one. It prints the port it listens on, then one line "ok" for every further status. test_watch_page.py drives it.
//
//   watch_fixture [port]
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <mutex>

#include "server/watch/watch.h"

int main(int argc, char** argv) {
  std::mutex mutex;
  nlohmann::json status;
  try {
    std::string line;
    std::getline(std::cin, line);
    status = nlohmann::json::parse(line);
    const gradwire::server::Watch watch("127.0.0.1", argc > 1 ? std::atoi(argv[1]) : 0, [&] {
      const std::lock_guard lock(mutex);
      return status;
    });
    std::printf("%d\n", watch.port());
    std::fflush(stdout);
    while (std::getline(std::cin, line)) {
      auto next = nlohmann::json::parse(line);
      {
        const std::lock_guard lock(mutex);
        status = std::move(next);
      }
      std::printf("ok\n");
      std::fflush(stdout);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "watch_fixture: %s\n", error.what());
    return 1;
  }
  return 0;
}
