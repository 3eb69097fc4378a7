// SPDX-License-Identifier: Apache-2.0
#include "server/saving.h"

#include <utility>

#include "core/file.h"
#include "gradwire/error.h"

namespace gradwire::server {

Saving::Saving(HubContext& context, Membership& membership, Status& status, std::function<void()> on_saved)
    : context_(context), membership_(membership), status_(status), on_saved_(std::move(on_saved)) {}

Saving::~Saving() { stop(); }

void Saving::load() {
  if (context_.options.checkpoint.empty()) return;
  // A symbolic link stays what it is: the file that it leads to now is the checkpoint, with its lock and the former one
  // beside it. So two servers do not share a file by two names, and a link that is changed later changes nothing here.
  context_.options.checkpoint = place_of(context_.options.checkpoint);
  lock_.emplace(context_.options.checkpoint);
  std::string note;
  const std::optional<ServerState> found = load_newest(context_.options.checkpoint, &note);
  if (!note.empty()) context_.log("checkpoint", {{"note", note}});
  if (!found) return;
  context_.model = restore_model(*found, context_.options, membership_);
  status_.restore(found->extra, context_.model->step());
  context_.log("restored", {{"step", found->step}, {"workers", membership_.all().size()}});
}

void Saving::start() {
  writer_ = std::thread([this] { write_loop(); });
}

void Saving::stop() {
  {
    const std::lock_guard lock(context_.mutex);
    stop_ = true;
  }
  wake_.notify_all();
  if (writer_.joinable()) writer_.join();
}

// In asynchronous mode a version is one update, and one update of each worker makes what elsewhere is a step.
uint64_t Saving::interval() const {
  const HubOptions& options = context_.options;
  return options.save_every * (options.async ? std::max(1u, membership_.present()) : 1);
}

// Whether the disk fails or is slow makes no difference to workers, who keep everything until it is on disk.
bool Saving::holds_up(const ServerModel& model, uint32_t shard) const {
  return !context_.options.checkpoint.empty() && model.versions[shard] >= model.durable[shard] + 3 * interval() + 1;
}

void Saving::request_if_overdue(const ServerModel& model) {
  if (busy() || retrying_) return;
  for (uint32_t p = 0; p < model.layouts.size(); ++p)
    if (holds_up(model, p)) return request();
}

void Saving::request() {
  const std::shared_ptr<ServerModel> model = context_.model;
  if (context_.options.checkpoint.empty() || !model || !model->whole()) return;
  if (busy()) {
    again_ = true;
    return;
  }
  copying_ = std::make_shared<ModelCopy>();
  copying_->shards.resize(model->layouts.size());
  copying_->missing = model->layouts.size();
  // What a worker sent before its goodbye is in the strands already, ahead of the copies. A worker that leaves later is
  // not in this checkpoint.
  for (const auto& [slot, worker] : membership_.all()) {
    if (worker.left) copying_->left.insert(slot);
    if (worker.left && worker.session) copying_->leavers.push_back(worker.session);
  }
  for (uint32_t p = 0; p < model->layouts.size(); ++p)
    context_.post(p, [this, model, copy = copying_, p] {
      ShardSnapshot snapshot = model->queues[p].shard->snapshot();
      const std::lock_guard lock(context_.mutex);
      copy->shards[p] = std::move(snapshot);
      if (--copy->missing > 0) return;
      writing_ = std::exchange(copying_, nullptr);
      wake_.notify_all();
    });
}

std::string Saving::write(const ServerModel& model, const ModelCopy& copy, uint64_t& bytes) const {
  try {
    ServerState state = copied_arrays(model, copy);
    {
      const std::lock_guard lock(context_.mutex);
      add_bookkeeping(state, model, copy, context_.options, membership_);
      status_.save(state.extra);
    }
    save_state(context_.options.checkpoint, state, context_.options.save_hook);
    for (const StoredArray& one : state.weights) bytes += 4 * one.values.size();
    return {};
  } catch (const std::exception& failure) {
    return failure.what();
  }
}

void Saving::succeeded(ServerModel& model, const ModelCopy& copy, uint64_t bytes) {
  ++saved_;
  bytes_ = bytes;
  last_ = SteadyClock::now();
  for (size_t p = 0; p < copy.shards.size(); ++p) model.durable[p] = copy.shards[p].version;
  const Blob text = text_blob({{"durable", model.durable}});
  for (const auto& [slot, worker] : membership_.all())
    if (worker.session) worker.session->send({.kind = FrameKind::durable}, text);
  for (const std::weak_ptr<Session>& one : copy.leavers)
    if (const auto session = one.lock()) session->send({.kind = FrameKind::notice}, text_blob({{"left", true}}));
  if (!error_.empty()) context_.log("saving again", {{"path", context_.options.checkpoint}});
  context_.log_saved({{"path", context_.options.checkpoint}, {"step", model.durable_step()}, {"bytes", bytes}});
  error_.clear();
}

void Saving::failed(const std::string& error) {
  ++failed_;
  // The journal says it once, not every second.
  if (error != error_) context_.log("cannot save", {{"path", context_.options.checkpoint}, {"error", error}});
  error_ = error;
}

void Saving::write_loop() {
  std::unique_lock lock(context_.mutex);
  while (true) {
    wake_.wait(lock, [this] { return stop_ || writing_; });
    if (!writing_) return;
    const std::shared_ptr<ServerModel> model = context_.model;
    const std::shared_ptr<ModelCopy> copy = writing_;
    uint64_t bytes = 0;
    lock.unlock();
    const std::string error = write(*model, *copy, bytes);
    lock.lock();
    if (error.empty())
      succeeded(*model, *copy, bytes);
    else
      failed(error);
    writing_ = nullptr;
    if (!error.empty() && !stop_ && !context_.draining) {
      // Not at once: a disk that is full stays full for a while. A server that stops does not wait for it.
      retrying_ = true;
      wake_.wait_for(lock, std::chrono::seconds(1), [this] { return stop_ || context_.draining; });
      retrying_ = false;
      again_ = true;
    }
    if (std::exchange(again_, false) && !stop_) request();
    wake_.notify_all();  // drain() may wait for this
    if (error.empty()) {
      lock.unlock();
      on_saved_();
      lock.lock();
    }
    if (stop_ && !writing_) return;
  }
}

void Saving::drain(std::unique_lock<std::mutex>& lock) {
  context_.draining = true;
  if (!context_.model || !context_.model->whole() || context_.options.checkpoint.empty()) return;
  // A copy that is under way may lack what was acknowledged since: the one after it counts.
  const uint64_t before = saved_ + failed_ + (busy() ? 1 : 0);
  request();
  wake_.wait_for(lock, std::chrono::seconds(60), [&] { return saved_ + failed_ > before && !busy() && !again_; });
}

nlohmann::json Saving::report() const {
  using nlohmann::json;
  const HubOptions& options = context_.options;
  return {{"path", options.checkpoint.empty() ? json(nullptr) : json(options.checkpoint)},
          {"every", options.save_every},
          {"saved", saved_},
          {"failed", failed_},
          {"last_error", error_.empty() ? json(nullptr) : json(error_)},
          {"last_s", last_ ? json(seconds_since(*last_)) : json(nullptr)},
          {"bytes", bytes_}};
}

}  // namespace gradwire::server
