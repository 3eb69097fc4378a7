// SPDX-License-Identifier: Apache-2.0
// A thread per rank of a loopback engine. What one of them throws poisons its engine, so that the others do not wait
// for the time-out; the caller gets what was thrown first, not what followed from it.
#include <exception>
#include <mutex>
#include <thread>

#include "engine/call.h"
#include "gradwire/engine.h"

namespace gradwire {

namespace {

using namespace engine_detail;

// What the ranks of a run threw, in the order of time.
class Failures {
 public:
  void add(std::exception_ptr error) {
    std::unique_lock lock(mutex_);
    errors_.push_back(std::move(error));
  }

  // The first, unless it only says that a rank has left or poisoned its engine: a rank that unwinds drops its
  // sub-engines before its own error gets here, and the others may then be first to complain.
  void rethrow() {
    for (const std::exception_ptr& error : errors_) {
      if (!consequence(error)) std::rethrow_exception(error);
    }
    if (!errors_.empty()) std::rethrow_exception(errors_.front());
  }

 private:
  static bool consequence(const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const Error& e) {
      return e.kind() == ErrorKind::engine && (e.field() == kLeft || e.field() == kPoison);
    } catch (...) {
      return false;
    }
  }

  std::mutex mutex_;
  std::vector<std::exception_ptr> errors_;
};

std::string words_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

void run_loopback(int world, const std::function<void(Engine&)>& body) {
  auto engines = make_loopback(world);
  Failures failures;
  const auto run = [&](std::unique_ptr<Engine> engine) {
    try {
      body(*engine);
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      failures.add(error);
      engine->poison(words_of(error));
    }
    // The engine goes with the thread: whoever still waits for this rank is told at once.
  };
  std::vector<std::thread> threads;
  try {
    threads.reserve(engines.size());
    for (auto& engine : engines) threads.emplace_back(run, std::move(engine));
  } catch (...) {
    failures.add(std::current_exception());
    engines.clear();  // the ranks that have no thread leave
  }
  for (std::thread& thread : threads) thread.join();
  failures.rethrow();
}

}  // namespace gradwire
