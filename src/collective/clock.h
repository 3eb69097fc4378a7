// SPDX-License-Identifier: Apache-2.0
// Where the time of a collective goes. A spell is a stretch of work or of waiting, from its making to its end; spells
// do not overlap, and all of them are on the thread that runs the collective. Work that this thread does alone is
// counted in its processor time, so that ranks which share a processor do not count each other's; work that pool
// threads or a GPU do for it passes by the clock on the wall, and so does waiting.
#pragma once

#include <time.h>

#include "gradwire/collective.h"

namespace gradwire {

class Clock {
 public:
  class Spell {
   public:
    Spell(double& sum, clockid_t clock) : sum_(sum), clock_(clock), begin_(now(clock)) {}
    ~Spell() { sum_ += now(clock_) - begin_; }
    Spell(const Spell&) = delete;
    Spell& operator=(const Spell&) = delete;

   private:
    static double now(clockid_t clock) {
      timespec t{};
      clock_gettime(clock, &t);
      return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
    }
    double& sum_;
    clockid_t clock_;
    double begin_;
  };

  explicit Clock(const Device& device)
      : work_(device.kind == Device::Kind::cpu && device.threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC) {}
  [[nodiscard]] Spell encode() { return {times_.encode, work_}; }
  [[nodiscard]] Spell decode() { return {times_.decode, work_}; }
  [[nodiscard]] Spell wait() { return {times_.wait, CLOCK_MONOTONIC}; }
  const ReduceTimes& times() const { return times_; }

 private:
  clockid_t work_;
  ReduceTimes times_;
};

}  // namespace gradwire
