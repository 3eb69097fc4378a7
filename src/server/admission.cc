// SPDX-License-Identifier: Apache-2.0
#include "server/admission.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "gradwire/error.h"
#include "io/safetensors.h"

namespace gradwire::server {
namespace {

constexpr size_t kMaxWorkerName = 128;

uint64_t random_number() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) >> 1;
}

std::string text_field(const nlohmann::json& text, const char* field, size_t least, size_t most) {
  const auto found = text.find(field);
  if (found == text.end() || !found->is_string())
    throw Error(ErrorKind::frame, fmt::format("bad hello: {} is not a text", field), field);
  const std::string value = found->get<std::string>();
  if (value.size() < least || value.size() > most)
    throw Error(ErrorKind::frame,
                fmt::format("bad hello: {} has {} bytes; allowed are {} to {}", field, value.size(), least, most),
                field);
  return value;
}

}  // namespace

Admission::Admission(HubContext& context, Membership& membership, Status& status, Saving& saving)
    : context_(context), membership_(membership), status_(status), saving_(saving), run_(random_number()) {}

bool Admission::hello(const std::shared_ptr<Session>& session, const nlohmann::json& text) {
  const std::string id = text_field(text, "id", 8, 64), name = text_field(text, "name", 0, kMaxWorkerName);
  const auto found = text.find("signature");
  if (found == text.end()) throw Error(ErrorKind::frame, "bad hello: there is no signature", "signature");
  const Signature signature = Signature::parse(*found);

  const auto refuse = [&](Refusal why, const char* reason, const std::string& words) {
    status_.count_refusal(reason);
    context_.log_refusal(reason, session->peer(), words);
    session->refuse(why, words);
    return false;
  };
  const bool bench = text.value("bench", false);
  std::unique_lock lock(context_.mutex);
  do {  // the model may be forgotten again while the lock is not held
    if (context_.stopping) {
      session->refuse(Refusal::stopping, "the server is stopping");
      return false;
    }
    if (membership_.find(session.get())) throw Error(ErrorKind::frame, "bad hello: this is the second one", "kind");
    if (bench != context_.options.bench)
      return refuse(Refusal::signature, "bench",
                    bench ? "gradwire load brings a model that nobody trains: it works with a server that was started "
                            "with --bench"
                          : "this server was started with --bench and takes gradwire load alone");
    lock.unlock();
    const std::string reason = reason_against(signature);
    lock.lock();
    if (!reason.empty()) return refuse(Refusal::signature, "signature", "this worker trains something else: " + reason);
  } while (!context_.model);
  const uint32_t most = context_.options.max_workers;
  const bool returns = membership_.find(id) != nullptr;
  if (!returns && membership_.present() >= most)
    return refuse(Refusal::full, "full", fmt::format("the server is full: it takes {} workers (--max-workers)", most));
  WorkerRecord& worker = membership_.connect(id, name, session, context_.model->layouts.size());
  if (context_.model->whole()) {
    welcome(worker, false);
  } else if (!initialiser_ || *initialiser_ == worker.slot) {
    ask_for_weights(worker);
  } else if (std::find(waiting_.begin(), waiting_.end(), worker.slot) == waiting_.end()) {
    waiting_.push_back(worker.slot);
  }
  nlohmann::json event = worker.label();
  event["slot"] = worker.slot;
  event["peer"] = session->peer();
  event["present"] = membership_.present();
  lock.unlock();
  context_.log(returns ? "back" : "joined", std::move(event));
  return true;
}

std::string Admission::reason_against(const Signature& signature) {
  const auto difference = [&](std::string& words) {
    const std::lock_guard lock(context_.mutex);
    if (context_.model) words = context_.model->signature.difference(signature);
    return context_.model != nullptr;
  };
  std::string words;
  try {
    check_limits(signature, context_.options.limits);
    if (difference(words)) return words;
    const std::lock_guard making(making_);
    if (difference(words)) return words;  // another worker was faster
    std::shared_ptr<ServerModel> model = make_model(signature);
    const std::lock_guard lock(context_.mutex);
    context_.model = std::move(model);
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

// The first worker says what is trained; a file may have the weights.
std::shared_ptr<ServerModel> Admission::make_model(const Signature& signature) const {
  if (signature.sends_updates && context_.options.async)
    throw Error(ErrorKind::usage, "updates down need steps: this server has none (--mode async); send weights", "mode");
  if (signature.pools && context_.options.async)
    throw Error(ErrorKind::usage, "shared moments need steps: this server has none (--mode async)", "mode");
  if (signature.sgd && context_.options.async)
    throw Error(ErrorKind::usage,
                "the momentum of sgd needs steps: this server has none (--mode async); use --optimizer qadam", "mode");
  auto model = std::make_shared<ServerModel>(signature, context_.options.shard_elements, context_.options.async);
  if (!context_.options.init.empty()) read_init(*model);
  return model;
}

void Admission::read_init(ServerModel& model) const {
  const std::string& path = context_.options.init;
  const SafetensorsFile file(path);
  std::unordered_map<std::string_view, const StoredTensor*> all;
  for (const StoredTensor& one : file.tensors()) all.emplace(one.name, &one);
  std::vector<std::vector<float>> values;
  for (const Variable& one : model.signature.parameters) {
    const auto found = all.find(one.name);
    if (found == all.end()) throw Error(ErrorKind::usage, fmt::format("{} has no tensor '{}'", path, one.name), "init");
    if (found->second->shape != one.shape)
      throw Error(ErrorKind::usage, fmt::format("'{}' has another shape in {}", one.name, path), "init");
    values.push_back(file.read_f32(*found->second));
  }
  const std::vector<std::span<const float>> spans(values.begin(), values.end());
  // No other thread knows this model yet, so its shards can be set here and not on their strands.
  for (size_t p = 0; p < model.weight_shards(); ++p) {
    model.queues[p].shard->set(model.layouts[p].gather(spans));
    model.ready[p] = 1;
  }
}

void Admission::ask_for_weights(const WorkerRecord& worker) {
  initialiser_ = worker.slot;
  initial_since_ = SteadyClock::now();
  welcome(worker, true);
}

void Admission::welcome(const WorkerRecord& worker, bool initial) {
  const std::shared_ptr<ServerModel> model = context_.model;
  nlohmann::json text = {{"run", run_},
                         {"slot", worker.slot},
                         {"initial", initial},
                         {"durable", context_.options.checkpoint.empty() ? model->versions : model->durable},
                         // In asynchronous mode versions count updates, and workers count steps of their own: a
                         // newcomer begins at the step of the worker that has made most.
                         {"steps", membership_.most_steps(model->weight_shards())},
                         {"part_elements", context_.options.shard_elements},
                         {"async", context_.options.async}};
  // Only the shards know what of this worker's was applied. Each adds its numbers, and the last one sends the answer,
  // which is therefore consistent with every frame that a strand handles after it.
  struct Gathered {
    std::mutex mutex;
    nlohmann::json text;
    std::vector<uint64_t> sequence, versions;
    size_t missing;
  };
  auto gathered = std::make_shared<Gathered>();
  gathered->text = std::move(text);
  gathered->sequence.resize(model->layouts.size());
  gathered->versions.resize(model->layouts.size());
  gathered->missing = model->layouts.size();
  for (uint32_t p = 0; p < model->layouts.size(); ++p)
    context_.post(p, [model, session = worker.session, gathered, p, slot = worker.slot, buffers = model->buffers] {
      const ServerShard& shard = *model->queues[p].shard;
      const auto progress = shard.progress().find(slot);
      const std::lock_guard lock(gathered->mutex);
      gathered->sequence[p] = progress == shard.progress().end() ? 0 : progress->second.sequence;
      gathered->versions[p] = shard.version();
      if (--gathered->missing > 0) return;
      gathered->text["sequence"] = gathered->sequence;
      gathered->text["versions"] = gathered->versions;
      session->send({.kind = FrameKind::welcome}, text_blob(gathered->text));
      if (buffers) session->send({.kind = FrameKind::buffers}, buffers);
    });
}

void Admission::set_initial(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame,
                            const Blob& payload, std::function<void()> done) {
  std::shared_ptr<ServerModel> model;
  {
    const std::lock_guard lock(context_.mutex);
    model = context_.model;
    if (!model || !initialiser_ || *initialiser_ != slot)
      throw Error(ErrorKind::frame, "bad frame: this worker was not asked for first weights", "kind");
    if (frame.shard >= model->weight_shards())
      throw Error(ErrorKind::frame, "bad frame: this shard is not of weights", "shard");
  }
  context_.post(frame.shard, [this, model, session, slot, frame, payload, done = std::move(done)] {
    // The worker may have vanished while this waited in the strand, and another one may be bringing the weights now.
    const auto still_asked = [&] { return model == context_.model && initialiser_ && *initialiser_ == slot; };
    {
      const std::lock_guard lock(context_.mutex);
      if (!still_asked()) return done();
    }
    ServerShard& shard = *model->queues[frame.shard].shard;
    try {
      shard.set(*payload);
    } catch (const std::exception& error) {  // they are malformed, or there is no memory for them
      {
        const std::lock_guard lock(context_.mutex);
        status_.count_refusal("corrupt");
      }
      context_.log_refusal("corrupt", session->peer(), error.what());
      session->refuse(Refusal::malformed, error.what());
      return done();
    }
    {
      const std::lock_guard lock(context_.mutex);
      if (still_asked()) {
        // Only a shard that was missing is progress: one shard, again and again, is none.
        if (!std::exchange(model->ready[frame.shard], 1)) initial_since_ = SteadyClock::now();
        model->bytes[frame.shard] = shard.bytes();
        if (model->whole()) all_ready();
      }
    }
    done();
  });
}

void Admission::all_ready() {
  initialiser_.reset();
  for (uint32_t slot : std::exchange(waiting_, {}))
    if (const WorkerRecord* worker = membership_.find(slot); worker && worker->session) welcome(*worker, false);
  saving_.request();  // from here on, a server that is killed has something to go on from
}

bool Admission::gone(uint32_t slot) {
  std::erase(waiting_, slot);
  if (!initialiser_ || *initialiser_ != slot) return true;
  initialiser_.reset();
  ServerModel& model = *context_.model;
  while (!waiting_.empty()) {
    const WorkerRecord* next = membership_.find(waiting_.front());
    waiting_.erase(waiting_.begin());
    if (!next || !next->session) continue;
    // What the one before has sent does not count: a mixture of two initialisations is none.
    std::fill_n(model.ready.begin(), model.weight_shards(), 0);
    ask_for_weights(*next);
    return true;
  }
  context_.model = nullptr;
  membership_.clear();
  return false;
}

void Admission::check_initial() {
  if (!initialiser_ || seconds_since(initial_since_) <= context_.options.initial_s) return;
  WorkerRecord* worker = membership_.find(*initialiser_);
  if (!worker || !worker->session) return;
  const std::shared_ptr<Session> session = worker->session;
  const uint32_t slot = worker->slot;
  const std::string words =
      fmt::format("this worker was asked for the first weights and has sent none for {:.0f} s (--initial)",
                  context_.options.initial_s);
  status_.count_refusal("slow");
  context_.log_refusal("slow", session->peer(), words);
  membership_.disconnect(*worker);  // now: its connection may take a while to end
  gone(slot);
  session->refuse(Refusal::slow, words);
}

}  // namespace gradwire::server
