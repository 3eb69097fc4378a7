// SPDX-License-Identifier: Apache-2.0
// Where the time of a collective goes. The timers do not overlap, and all of them run on the thread that runs the
// collective. Work that this thread does alone is measured in its processor time, so that ranks which share a processor
// do not count each other's; work that pool threads or a GPU do for it is measured in wall time, and so is waiting.
#pragma once

#include "core/clock.h"
#include "gradwire/collective.h"

namespace gradwire {

inline ReduceTimes& operator+=(ReduceTimes& sum, const ReduceTimes& more) {
  sum.encode += more.encode;
  sum.wait += more.wait;
  sum.decode += more.decode;
  return sum;
}

class ReduceTimer {
 public:
  explicit ReduceTimer(const Device& device)
      : work_(device.kind == Device::Kind::cpu && device.threads == 1 ? TimerClock::thread_cpu : TimerClock::wall) {}
  [[nodiscard]] ScopedTimer encode() { return ScopedTimer(times_.encode, work_); }
  [[nodiscard]] ScopedTimer decode() { return ScopedTimer(times_.decode, work_); }
  [[nodiscard]] ScopedTimer wait() { return ScopedTimer(times_.wait); }
  const ReduceTimes& times() const { return times_; }

 private:
  TimerClock work_;
  ReduceTimes times_;
};

}  // namespace gradwire
