// SPDX-License-Identifier: Apache-2.0
// Threads that share many strands of work. What is posted to one strand runs in order and never twice at once, so what
// belongs to a strand needs no lock; different strands run side by side.
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
  Strands(int threads, size_t strands);
  ~Strands() { stop(); }
  void stop();  // what runs ends, what waits is dropped, what is posted from now on too
  void post(size_t strand, std::function<void()> work);

 private:
  void run();

  struct Strand {
    std::deque<std::function<void()>> waiting;
    bool busy = false;  // runs, or stands in ready_
  };
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Strand> strands_;
  std::deque<size_t> ready_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace gradwire::server
