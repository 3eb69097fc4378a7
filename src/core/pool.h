// SPDX-License-Identifier: Apache-2.0
// A fixed set of threads that share a loop. The caller's thread works too, so Pool(1) starts none and costs nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace gradwire {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(task, worker) for every task in [0, tasks), in any order, worker in [0, threads()). Returns when all are
  // done; rethrows the first error. One run at a time.
  void run(size_t tasks, const std::function<void(size_t task, int worker)>& body);

 private:
  void work(int worker);
  void take_tasks(int worker);

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  uint64_t generation_ = 0;  // guarded by mutex_; a new number is a new run
  bool stop_ = false;
  size_t busy_ = 0;
  size_t tasks_ = 0;
  const std::function<void(size_t, int)>* body_ = nullptr;
  std::exception_ptr error_;
  std::atomic<size_t> next_{0};
};

}  // namespace gradwire
