// SPDX-License-Identifier: Apache-2.0
#include "server/strands.h"

#include <exception>
#include <utility>

namespace gradwire::server {

Strands::Strands(int threads, size_t strands, std::function<void(const char*)> failed)
    : failed_(std::move(failed)), strands_(strands) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
}

void Strands::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void Strands::post(size_t strand, std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return;
    Strand& own = strands_[strand];
    own.waiting.push_back(std::move(work));
    if (own.busy) return;
    own.busy = true;
    ready_.push_back(strand);
  }
  wake_.notify_one();
}

void Strands::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stop_ || !ready_.empty(); });
    if (stop_) return;
    const size_t index = ready_.front();
    ready_.pop_front();
    std::function<void()> work = std::move(strands_[index].waiting.front());
    strands_[index].waiting.pop_front();
    lock.unlock();
    try {
      work();
    } catch (const std::exception& error) {
      failed_(error.what());
    }
    work = nullptr;  // not under the lock: it may own the last reference to an object that posts when it is destroyed
    lock.lock();
    if (strands_[index].waiting.empty()) {
      strands_[index].busy = false;
    } else {
      ready_.push_back(index);  // behind the others: one busy strand does not starve them
      wake_.notify_one();
    }
  }
}

}  // namespace gradwire::server
