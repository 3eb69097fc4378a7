// SPDX-License-Identifier: Apache-2.0
// All ranks must start the same operations on an engine in the same order, so everything that uses an engine goes
// through one thread: the CommandQueue of that engine. It runs tasks one after the other in the order in which they are
// submitted, which is the order of the program and so the same on all ranks. Several reducers on one engine share the
// queue; if each had a thread of its own, their operations would interleave differently on every rank. An engine that
// stays on its thread has a queue without a thread, where submit() runs the task itself.
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

class CommandQueue {
 public:
  // The end of a task. The error is moved to the thread that waits: the queue's thread keeps no reference to it, so no
  // exception is shared between threads.
  class Ticket {
   public:
    void wait();  // throws what the task threw; once

   private:
    friend class CommandQueue;
    void finish(std::exception_ptr error);
    std::mutex mutex_;
    std::condition_variable wake_;
    bool done_ = false;
    std::exception_ptr error_;
  };

  static std::shared_ptr<CommandQueue> of(Engine& engine);  // it ends with its last owner
  explicit CommandQueue(bool callers_thread = false);
  ~CommandQueue();  // runs the tasks that were submitted before
  CommandQueue(const CommandQueue&) = delete;
  CommandQueue& operator=(const CommandQueue&) = delete;

  std::shared_ptr<Ticket> submit(std::function<void()> task);
  void finish();  // waits until everything that was submitted so far has run

 private:
  void work();
  static void run(std::function<void()> task, Ticket& ticket);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::pair<std::function<void()>, std::shared_ptr<Ticket>>> tasks_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

// Runs `task` in its turn among the engine's tasks and waits for it. An engine without a queue runs it at once.
void run_in_order(Engine& engine, const std::function<void()>& task);

}  // namespace gradwire
