// SPDX-License-Identifier: Apache-2.0
#include "collective/command_queue.h"

#include <map>

namespace gradwire {
namespace {

// The registry is never destroyed: a queue that a static object owns may end after all static objects of this file.
struct Registry {
  std::mutex mutex;
  std::map<Engine*, std::weak_ptr<CommandQueue>> queues;
};

Registry& registry() {
  static Registry* const it = new Registry;
  return *it;
}

std::shared_ptr<CommandQueue> find(Engine& engine) {
  std::lock_guard lock(registry().mutex);
  std::erase_if(registry().queues, [](const auto& entry) { return entry.second.expired(); });
  const auto found = registry().queues.find(&engine);
  return found == registry().queues.end() ? nullptr : found->second.lock();
}

}  // namespace

std::shared_ptr<CommandQueue> CommandQueue::of(Engine& engine) {
  if (auto queue = find(engine)) return queue;
  auto fresh = std::make_shared<CommandQueue>(engine.stays_on_its_thread());
  std::lock_guard lock(registry().mutex);
  std::weak_ptr<CommandQueue>& slot = registry().queues[&engine];
  if (auto other = slot.lock()) return other;
  slot = fresh;
  return fresh;
}

CommandQueue::CommandQueue(bool callers_thread) {
  if (!callers_thread) thread_ = std::thread([this] { work(); });
}

CommandQueue::~CommandQueue() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void CommandQueue::Ticket::wait() {
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [this] { return done_; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void CommandQueue::Ticket::finish(std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  error_ = std::move(error);
  done_ = true;
  wake_.notify_all();
}

std::shared_ptr<CommandQueue::Ticket> CommandQueue::submit(std::function<void()> task) {
  auto ticket = std::make_shared<Ticket>();
  if (!thread_.joinable()) {
    run(std::move(task), *ticket);
    return ticket;
  }
  {
    std::lock_guard lock(mutex_);
    tasks_.emplace_back(std::move(task), ticket);
  }
  wake_.notify_one();
  return ticket;
}

void CommandQueue::finish() {
  submit([] {})->wait();
}

void CommandQueue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    auto [task, ticket] = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    run(std::move(task), *ticket);
    lock.lock();
  }
}

void CommandQueue::run(std::function<void()> task, Ticket& ticket) {
  std::exception_ptr error;
  try {
    task();
  } catch (...) {
    error = std::current_exception();
  }
  task = nullptr;  // what it owns is released before the waiting thread wakes up
  ticket.finish(std::move(error));
}

void run_in_order(Engine& engine, const std::function<void()>& task) {
  if (auto queue = find(engine))
    queue->submit(task)->wait();
  else
    task();
}

}  // namespace gradwire
