// SPDX-License-Identifier: Apache-2.0
#include "core/pool.h"

#include <fmt/format.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#include "gradwire/error.h"

namespace gradwire {
namespace {

// Tasks write large results past the caches. Such stores may become visible after later ones of the same thread, so
// without this a caller could say that a result is there, in an atomic variable, before it is.
void order_streamed_stores() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_sfence();
#endif
}

}  // namespace

Pool::Pool(int threads) {
  if (threads < 1 || threads > 1024)
    throw Error(ErrorKind::usage, fmt::format("threads is {}; allowed are 1 to 1024", threads), "threads");
  for (int worker = 1; worker < threads; ++worker) workers_.emplace_back([this, worker] { work(worker); });
}

Pool::~Pool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : workers_) thread.join();
}

void Pool::run(size_t tasks, const std::function<void(size_t, int)>& body) {
  if (workers_.empty() || tasks <= 1) {
    for (size_t task = 0; task < tasks; ++task) body(task, 0);
    order_streamed_stores();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    tasks_ = tasks;
    body_ = &body;
    error_ = nullptr;
    next_.store(0, std::memory_order_relaxed);
    busy_ = workers_.size();
    ++generation_;
  }
  wake_.notify_all();
  take_tasks(0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return busy_ == 0; });
  if (error_) std::rethrow_exception(error_);
}

void Pool::take_tasks(int worker) {
  try {
    for (size_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) (*body_)(task, worker);
  } catch (...) {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
    next_.store(tasks_, std::memory_order_relaxed);
  }
  order_streamed_stores();
}

void Pool::work(int worker) {
  uint64_t seen = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
    }
    take_tasks(worker);
    bool last;
    {
      std::lock_guard lock(mutex_);
      last = --busy_ == 0;
    }
    if (last) done_.notify_one();
  }
}

}  // namespace gradwire
