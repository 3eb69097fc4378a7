// SPDX-License-Identifier: Apache-2.0
#include "cli/interrupts.h"

#include <csignal>
#include <ctime>

namespace gradwire::app {
namespace {

std::atomic<bool> interrupted{false};
std::atomic<int64_t> interrupted_at{0};

// One Ctrl-C may arrive twice, from the terminal and from a launcher. Only another one a second later is a second one.
void on_signal(int number) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (!interrupted.exchange(true)) {
    interrupted_at = now.tv_sec;
  } else if (now.tv_sec > interrupted_at + 1) {
    std::signal(number, SIG_DFL);
    std::raise(number);
  }
}

}  // namespace

const std::atomic<bool>& catch_interrupts() {
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  std::signal(SIGXFSZ, SIG_IGN);  // a file-size limit is then an error of write(), like a full disk
  return interrupted;
}

}  // namespace gradwire::app
