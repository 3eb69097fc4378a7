// SPDX-License-Identifier: Apache-2.0
// Threads that share many strands of work. Work that is posted to one strand runs in order, one piece at a time, so
// data that belongs to a strand needs no lock; different strands run in parallel.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace gradwire::server {

class Strands {
 public:
  // `failed` is told of work that ends with an exception, which ends nothing else.
  Strands(int threads, size_t strands, std::function<void(const char* why)> failed);
  ~Strands() { stop(); }
  void stop();  // waits for work that runs; drops work that waits, and work that is posted from now on
  void post(size_t strand, std::function<void()> work);

 private:
  void run();

  struct Strand {
    std::deque<std::function<void()>> waiting;
    bool busy = false;  // runs, or stands in ready_
  };
  const std::function<void(const char*)> failed_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Strand> strands_;
  std::deque<size_t> ready_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace gradwire::server
