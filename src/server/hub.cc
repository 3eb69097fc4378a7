// SPDX-License-Identifier: Apache-2.0
#include "server/hub.h"

#include <fmt/format.h>

#include "gradwire/error.h"

namespace gradwire::server {

ServerHub::ServerHub(HubOptions options)
    : context_(std::move(options)),
      membership_(context_.options),
      status_(context_, membership_),
      saving_(context_, membership_, status_, [this] { steps_.recheck(); }),
      steps_(context_, membership_, status_, saving_),
      admission_(context_, membership_, status_, saving_) {
  saving_.load();
  saving_.start();
  ticker_ = std::thread([this] { tick(); });
}

ServerHub::~ServerHub() {
  {
    const std::lock_guard lock(context_.mutex);
    context_.stopping = true;
  }
  tick_wake_.notify_all();
  saving_.stop();
  ticker_.join();
  context_.strands.stop();  // its work uses the other members, so it ends before they do
}

void ServerHub::count_refusal(const std::string& why, const std::string& peer, const std::string& words) {
  {
    const std::lock_guard lock(context_.mutex);
    status_.count_refusal(why);
  }
  context_.log_refusal(why, peer, words);
}

nlohmann::json ServerHub::status() const {
  const std::lock_guard lock(context_.mutex);
  return status_.report(saving_);
}

bool ServerHub::finished() const {
  const std::lock_guard lock(context_.mutex);
  return membership_.finished();
}

std::string ServerHub::failure() const {
  const std::lock_guard lock(context_.mutex);
  return status_.failure();
}

void ServerHub::received(const std::shared_ptr<Session>& session, const Frame& frame, Blob payload,
                         std::function<void()> done) {
  try {
    dispatch(session, frame, std::move(payload), done);
  } catch (const std::exception& error) {  // an Error, or no memory for what is announced
    count_refusal("corrupt", session->peer(), error.what());
    session->refuse(Refusal::malformed, error.what());
    done();
  }
}

// What can be said about a frame before any shard is asked.
uint32_t ServerHub::check_frame(const Session& session, const Frame& frame) {
  const std::lock_guard lock(context_.mutex);
  const WorkerRecord* worker = membership_.find(&session);
  if (!worker) throw Error(ErrorKind::frame, "bad frame: the first one must be a hello", "kind");
  if (frame.kind == FrameKind::report || frame.kind == FrameKind::goodbye) return worker->slot;
  if (!context_.model) throw Error(ErrorKind::frame, "bad frame: there are no weights yet", "kind");
  const size_t shards = context_.model->layouts.size();
  if (frame.kind != FrameKind::buffers && frame.shard >= shards)
    throw Error(ErrorKind::frame, fmt::format("bad frame: shard is {}; there are {}", frame.shard, shards), "shard");
  if ((frame.kind == FrameKind::update || frame.kind == FrameKind::residual) && frame.sequence == 0)
    throw Error(ErrorKind::frame, "bad frame: sequence is 0; updates are counted from 1", "sequence");
  return worker->slot;
}

void ServerHub::dispatch(const std::shared_ptr<Session>& session, const Frame& frame, Blob payload,
                         std::function<void()> done) {
  if (frame.kind == FrameKind::hello) {
    if (admission_.hello(session, read_text(*payload))) steps_.recheck();
    return done();
  }
  const uint32_t slot = check_frame(*session, frame);
  switch (frame.kind) {
    case FrameKind::report: {
      const nlohmann::json text = read_text(*payload);
      const std::lock_guard lock(context_.mutex);
      if (WorkerRecord* worker = membership_.find(slot)) worker->take_report(text);
      break;
    }
    case FrameKind::goodbye:
      goodbye(slot);
      steps_.recheck();  // steps may have waited for it
      break;
    case FrameKind::buffers: {
      const std::lock_guard lock(context_.mutex);
      if (context_.model) context_.model->set_buffers(payload);
      break;
    }
    case FrameKind::initial:
      return admission_.set_initial(session, slot, frame, payload, std::move(done));
    case FrameKind::update:
      return steps_.take_update(session, slot, frame, std::move(payload), std::move(done));
    case FrameKind::pull:
      return steps_.take_pull(session, slot, frame, std::move(done));
    case FrameKind::residual:
      return steps_.take_residual(session, slot, frame, std::move(payload), std::move(done));
    default:
      throw Error(ErrorKind::frame, "bad frame: a worker does not say this", "kind");
  }
  done();
}

// The residual came before it on the same connection, so it is in the strands already. The worker is told that it may
// go when a checkpoint has the residual; without checkpoints, at once.
void ServerHub::goodbye(uint32_t slot) {
  const std::lock_guard lock(context_.mutex);
  WorkerRecord* worker = membership_.find(slot);
  if (!worker) return;
  worker->left = true;
  if (context_.options.checkpoint.empty() || !context_.model || !context_.model->whole())
    worker->session->send({.kind = FrameKind::notice}, text_blob({{"left", true}}));
  else
    saving_.request();
  context_.log("left", worker->label());
}

void ServerHub::vanished(const Session* session) {
  std::unique_lock lock(context_.mutex);
  WorkerRecord* worker = membership_.find(session);
  if (!worker) return;
  membership_.disconnect(*worker);
  const bool left = worker->left;
  nlohmann::json event = worker->label();
  event["present"] = membership_.present();
  event["after_s"] = static_cast<uint64_t>(seconds_since(worker->joined));
  if (!admission_.gone(worker->slot)) return;
  if (const auto forgotten = membership_.forget_oldest()) steps_.forget_worker(context_.model, *forgotten);
  lock.unlock();
  if (!left) context_.log("vanished", std::move(event));
  steps_.recheck();
}

// Everything that happens because time passes.
void ServerHub::tick() {
  std::unique_lock lock(context_.mutex);
  while (!context_.stopping) {
    tick_wake_.wait_for(lock, std::chrono::milliseconds(50));
    const bool changed =
        membership_.expire([this](const WorkerRecord& worker) { context_.log("lost", worker.label()); });
    admission_.check_initial();
    const std::shared_ptr<ServerModel> model = context_.model;
    if (!model) continue;
    std::vector<uint32_t> open;
    for (uint32_t p = 0; p < model->layouts.size(); ++p)
      if (model->open[p] || changed) open.push_back(p);
    saving_.request_if_overdue(*model);
    lock.unlock();
    steps_.check_deadlines(model, open, changed);
    lock.lock();
  }
}

void ServerHub::stop() {
  std::vector<std::shared_ptr<Session>> sessions;
  {
    std::unique_lock lock(context_.mutex);
    if (context_.stopping) return;
    saving_.drain(lock);
    context_.stopping = true;
    for (const auto& [slot, worker] : membership_.all())
      if (worker.session) sessions.push_back(worker.session);
  }
  for (const auto& session : sessions) session->refuse(Refusal::stopping, "the server is stopping");
  if (const std::string why = failure(); !why.empty()) context_.log("failed", {{"note", why}});
  context_.log("stopped", {});
}

}  // namespace gradwire::server
