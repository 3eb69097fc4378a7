// SPDX-License-Identifier: Apache-2.0
// Time that is measured, never told: the readings only make sense as differences.
//
//   double encode_seconds = 0;
//   {
//     const ScopedTimer timer(encode_seconds);               // wall time, from here to the end of the scope
//     encode();
//   }
//   const ScopedTimer timer(seconds, TimerClock::thread_cpu);  // processor time of this thread alone
#pragma once

#include <time.h>

#include <chrono>

namespace gradwire {

using SteadyClock = std::chrono::steady_clock;  // it never jumps

inline double seconds_since(SteadyClock::time_point then) {
  return std::chrono::duration<double>(SteadyClock::now() - then).count();
}

// `thread_cpu` does not count the time in which this thread waits, or in which other threads use its processor. So
// ranks that share a processor do not measure each other.
enum class TimerClock : clockid_t { wall = CLOCK_MONOTONIC, thread_cpu = CLOCK_THREAD_CPUTIME_ID };

inline double clock_seconds(TimerClock clock = TimerClock::wall) {
  timespec t{};
  clock_gettime(static_cast<clockid_t>(clock), &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Adds the time between its construction and its destruction to `seconds`.
class ScopedTimer {
 public:
  explicit ScopedTimer(double& seconds, TimerClock clock = TimerClock::wall)
      : seconds_(seconds), clock_(clock), begin_(clock_seconds(clock)) {}
  ~ScopedTimer() { seconds_ += clock_seconds(clock_) - begin_; }
  ScopedTimer(const ScopedTimer&) = delete;
  ScopedTimer& operator=(const ScopedTimer&) = delete;

 private:
  double& seconds_;
  TimerClock clock_;
  double begin_;
};

}  // namespace gradwire
