// SPDX-License-Identifier: Apache-2.0
// The small tools of every measurement: medians, a clock, and a team of threads that start on one signal, for the plain
// copies and compute loops that codecs are compared with. docs/measuring.md defines the reported numbers.
#pragma once

#include <algorithm>
#include <barrier>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "core/check.h"

namespace gradwire::app {

inline double median(std::vector<double> values) {
  GW_CHECK(!values.empty());
  const size_t middle = values.size() / 2;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(middle), values.end());
  const double upper = values[middle];
  if (values.size() % 2 == 1) return upper;
  return (upper + *std::max_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(middle))) / 2;
}

// How far times lie apart: from the first to the third quartile, over the median. It is 0 for one value.
inline double spread(std::vector<double> values) {
  GW_CHECK(!values.empty());
  std::sort(values.begin(), values.end());
  const size_t last = values.size() - 1;
  return (values[last - last / 4] - values[last / 4]) / median(values);
}

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline int machine_threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

// run(body) calls body(i) on thread i of the team and returns when all have ended. The caller is thread 0.
class ThreadTeam {
 public:
  explicit ThreadTeam(int threads) : threads_(threads), start_(threads), end_(threads) {
    for (int i = 1; i < threads; ++i)
      workers_.emplace_back([this, i] {
        for (;;) {
          start_.arrive_and_wait();
          if (body_ == nullptr) return;
          (*body_)(i);
          end_.arrive_and_wait();
        }
      });
  }
  ~ThreadTeam() {
    body_ = nullptr;
    start_.arrive_and_wait();
  }
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;
  int threads() const { return threads_; }
  void run(const std::function<void(int)>& body) {
    body_ = &body;
    start_.arrive_and_wait();
    body(0);
    end_.arrive_and_wait();
  }

 private:
  int threads_;
  const std::function<void(int)>* body_ = nullptr;
  std::barrier<> start_, end_;
  std::vector<std::jthread> workers_;
};

// The share of [0, total) that thread i of n works on. Shares begin at multiples of `alignment`.
struct ThreadShare {
  uint64_t begin, end;
};
inline ThreadShare share_of(uint64_t total, int i, int n, uint64_t alignment = 1024) {
  const uint64_t units = (total + alignment - 1) / alignment;
  const auto edge = [&](uint64_t k) { return std::min(total, units * k / static_cast<uint64_t>(n) * alignment); };
  return {edge(static_cast<uint64_t>(i)), edge(static_cast<uint64_t>(i) + 1)};
}

}  // namespace gradwire::app
