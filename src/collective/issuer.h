// SPDX-License-Identifier: Apache-2.0
// All ranks must start the same operations on an engine in the same order, so whatever uses an engine goes through
// one thread: the Issuer of that engine. It takes tasks in the order in which they are submitted (the order of the
// program, which is the same on all ranks) and runs them one after the other. Several reducers on one engine share
// it; were each to have a thread of its own, their operations would interleave differently on every rank.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "gradwire/engine.h"

namespace gradwire {

class Issuer {
 public:
  // The end of a task. The error is handed over whole: the issuing thread keeps no reference to it, so exceptions are
  // not shared between threads.
  class Ticket {
   public:
    void wait();  // throws what the task threw; once

   private:
    friend class Issuer;
    void finish(std::exception_ptr error);
    std::mutex mutex_;
    std::condition_variable wake_;
    bool done_ = false;
    std::exception_ptr error_;
  };

  static std::shared_ptr<Issuer> of(Engine& engine);  // ends with the last who holds it
  Issuer();
  ~Issuer();  // after the tasks that were submitted
  Issuer(const Issuer&) = delete;
  Issuer& operator=(const Issuer&) = delete;

  std::shared_ptr<Ticket> submit(std::function<void()> task);
  void finish();  // until everything submitted so far has run

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::pair<std::function<void()>, std::shared_ptr<Ticket>>> tasks_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

// Runs `task` in its turn among the engine's tasks and waits; here and now if the engine has no issuer.
void issue(Engine& engine, const std::function<void()>& task);

}  // namespace gradwire
