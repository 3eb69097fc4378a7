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

std::future<void> Issuer::submit(std::function<void()> task) {
  std::packaged_task<void()> packaged(std::move(task));
  std::future<void> result = packaged.get_future();
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(packaged));
  }
  wake_.notify_one();
  return result;
}

void Issuer::finish() {
  submit([] {}).get();
}

void Issuer::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    std::packaged_task<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = {};  // what the task holds goes before the next one starts
    lock.lock();
  }
}

void issue(Engine& engine, const std::function<void()>& task) {
  if (auto issuer = find(engine))
    issuer->submit(task).get();
  else
    task();
}

}  // namespace gradwire
