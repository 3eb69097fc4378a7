// SPDX-License-Identifier: Apache-2.0
#include "collective/issuer.h"

#include <map>

namespace gradwire {
namespace {

// Never destroyed: an issuer held by a static object may end after everything that is.
struct Registry {
  std::mutex mutex;
  std::map<Engine*, std::weak_ptr<Issuer>> issuers;
};

Registry& registry() {
  static Registry* const it = new Registry;
  return *it;
}

std::shared_ptr<Issuer> find(Engine& engine) {
  std::lock_guard lock(registry().mutex);
  std::erase_if(registry().issuers, [](const auto& entry) { return entry.second.expired(); });
  const auto found = registry().issuers.find(&engine);
  return found == registry().issuers.end() ? nullptr : found->second.lock();
}

}  // namespace

std::shared_ptr<Issuer> Issuer::of(Engine& engine) {
  if (auto issuer = find(engine)) return issuer;
  auto fresh = std::make_shared<Issuer>();
  std::lock_guard lock(registry().mutex);
  std::weak_ptr<Issuer>& slot = registry().issuers[&engine];
  if (auto other = slot.lock()) return other;
  slot = fresh;
  return fresh;
}

Issuer::Issuer() : thread_([this] { work(); }) {}

Issuer::~Issuer() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Issuer::Ticket::wait() {
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [this] { return done_; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Issuer::Ticket::finish(std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  error_ = std::move(error);
  done_ = true;
  wake_.notify_all();
}

std::shared_ptr<Issuer::Ticket> Issuer::submit(std::function<void()> task) {
  auto ticket = std::make_shared<Ticket>();
  {
    std::lock_guard lock(mutex_);
    tasks_.emplace_back(std::move(task), ticket);
  }
  wake_.notify_one();
  return ticket;
}

void Issuer::finish() {
  submit([] {})->wait();
}

void Issuer::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    auto [task, ticket] = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      task();
    } catch (...) {
      error = std::current_exception();
    }
    task = nullptr;  // what it holds goes before anybody is told
    ticket->finish(std::move(error));
    lock.lock();
  }
}

void issue(Engine& engine, const std::function<void()>& task) {
  if (auto issuer = find(engine))
    issuer->submit(task)->wait();
  else
    task();
}

}  // namespace gradwire
