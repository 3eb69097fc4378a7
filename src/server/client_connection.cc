// SPDX-License-Identifier: Apache-2.0
// A worker's connection: how it is made, kept and made anew, and what the frames of the server change in the worker.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "gradwire/error.h"
#include "server/client.h"

namespace gradwire::server {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kFirstPause = 50ms, kLongestPause = 2000ms;  // between attempts to connect
constexpr double kSteady = 5;  // seconds after which a connection counts as one that worked

}  // namespace

double Client::patience_left() const {
  return until_ ? std::min(options_.patience_s, std::chrono::duration<double>(*until_ - SteadyClock::now()).count())
                : options_.patience_s;
}

void Client::persist(const std::function<void()>& work) {
  auto lost = SteadyClock::now();
  std::chrono::milliseconds pause = kFirstPause;
  while (true) {
    try {
      if (!link_) connect();
      work();
      return;
    } catch (const LinkLost& failure) {
      // Patience is counted from the last connection that worked. Pauses grow while connections end soon after they
      // began, so that a server in trouble is not flooded.
      if (link_) lost = SteadyClock::now();
      if (link_ && seconds_since(connected_) > kSteady) pause = kFirstPause;
      link_.reset();
      if (seconds_since(lost) > options_.patience_s || patience_left() <= 0)
        throw Error(ErrorKind::engine,
                    fmt::format("the server cannot be reached for {:.0f} s: {}", seconds_since(lost), failure.what()),
                    "server");
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, kLongestPause);
    }
  }
}

void Client::connect() {
  std::unique_ptr<Link> link = options_.dial();
  nlohmann::json hello = {{"id", id_}, {"name", options_.name}, {"signature", options_.signature.json()}};
  if (options_.bench) hello["bench"] = true;
  link->send({.kind = FrameKind::hello}, text_blob(hello));
  const auto asked = SteadyClock::now();
  Frame frame;
  Blob payload;
  // The welcome may take a while: the server sends it when some worker has brought the first weights.
  while (true) {
    if (!link->receive(frame, payload, until_ ? 100ms : 1000ms)) {
      if (seconds_since(asked) > options_.patience_s || patience_left() <= 0)
        throw LinkLost("the server does not say welcome");
      continue;
    }
    if (frame.kind == FrameKind::welcome) break;
  }
  if (joined_) ++counts_.reconnects;
  link_ = std::move(link);
  connected_ = SteadyClock::now();
  for (ClientShard& shard : shards_) shard.asked = false;  // answers to old requests went with the old connection
  take_welcome(read_text(*payload));
}

void Client::take_welcome(const nlohmann::json& text) {
  try {
    const uint64_t run = text.at("run").get<uint64_t>(), elements = text.at("part_elements").get<uint64_t>();
    const auto versions = text.at("versions").get<std::vector<uint64_t>>(),
               sequence = text.at("sequence").get<std::vector<uint64_t>>(),
               durable = text.at("durable").get<std::vector<uint64_t>>();
    slot_ = text.at("slot").get<uint32_t>();
    initial_ = text.at("initial").get<bool>();
    async_ = text.at("async").get<bool>();
    if (joined_ && initial_)
      throw Error(ErrorKind::engine, "the server has forgotten everything: it was restarted without its checkpoint",
                  "server");
    if (layouts_.empty()) {
      if (elements == 0) throw Error(ErrorKind::frame, "bad welcome: part_elements is 0", "part_elements");
      shard_elements_ = elements;
      make_shards();
    }
    if (elements != shard_elements_ || versions.size() != layouts_.size() || sequence.size() != layouts_.size() ||
        durable.size() != layouts_.size())
      throw Error(ErrorKind::engine,
                  "the server now shards the model differently: it is not the one that this worker joined", "server");
    for (size_t p = 0; p < layouts_.size(); ++p) {
      ClientShard& shard = shards_[p];
      if (run != run_) shard.held = kNone;  // another process: what it calls step n may be other weights
      shard.version = versions[p];
      shard.durable = durable[p];
      if (p < weight_shards_) {
        counts_.replayed += log_.reconcile(p, sequence[p], versions[p]);
      } else {
        shard.round = std::max(shard.round, versions[p]);
        if (shard.pooled && versions[p] <= shard.pooled_round) resend_pooled_ = true;
      }
      // Numbers that were used before this process began must not be used again.
      sequence_ = std::max(sequence_, sequence[p]);
    }
    run_ = run;
    if (async_ && !joined_) local_step_ = text.at("steps").get<uint64_t>();
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorKind::frame, fmt::format("bad welcome: {}", error.what()), "welcome");
  }
}

void Client::send(const Frame& frame, const Blob& payload) {
  link_->send(frame, payload);
  if (payload &&
      (frame.kind == FrameKind::update || frame.kind == FrameKind::residual || frame.kind == FrameKind::initial))
    counts_.messages_up += payload->size();
}

// Waits for one frame, then takes all that are there.
void Client::listen(std::span<float* const> weights, std::chrono::milliseconds patience) {
  Frame frame;
  Blob payload;
  if (patience_left() <= 0) throw Error(ErrorKind::engine, "the server does not answer in time", "server");
  if (until_) patience = std::min(patience, 100ms);
  while (true) {
    const auto begin = SteadyClock::now();
    const bool came = link_->receive(frame, payload, patience);
    times_.wait += seconds_since(begin);
    if (!came) return;
    handle(frame, payload, weights);
    patience = 0ms;
  }
}

void Client::handle(const Frame& frame, const Blob& payload, std::span<float* const> weights) {
  switch (frame.kind) {
    case FrameKind::buffers:
      buffers_ = payload;
      return;
    case FrameKind::notice: {
      const nlohmann::json text = payload ? read_text(*payload) : nlohmann::json::object();
      const auto left = text.find("left");
      if (left != text.end() && left->is_boolean() && left->get<bool>()) gone_ = true;
      return;
    }
    case FrameKind::durable:
      take_durable(read_text(*payload));
      return drop_durable();
    default:
      break;
  }
  if (frame.kind != FrameKind::weights || frame.shard >= shards_.size())
    throw LinkLost("the server says what a server does not say");
  ClientShard& shard = shards_[frame.shard];
  if (frame.sequence == shard.asked_for) shard.asked = false;
  shard.version = frame.step;
  if (frame.shard >= weight_shards_) shard.round = std::max(shard.round, frame.step);
  shard.durable = frame.held;
  if (frame.shard == 0) owns_buffers_ = frame.flags & kBufferOwner;
  if (payload && !payload->empty()) take_weights(frame, payload, weights);
  if (frame.sequence != 0 && frame.shard < weight_shards_) take_status(frame);
  drop_durable();
}

void Client::take_durable(const nlohmann::json& text) {
  const auto list = text.find("durable");
  if (list == text.end() || !list->is_array() || list->size() != shards_.size()) return;
  for (size_t p = 0; p < shards_.size(); ++p)
    if ((*list)[p].is_number_unsigned()) shards_[p].durable = (*list)[p].get<uint64_t>();
}

void Client::take_weights(const Frame& frame, const Blob& payload, std::span<float* const> weights) {
  counts_.messages_down += payload->size();
  const auto begin = SteadyClock::now();
  ClientShard& shard = shards_[frame.shard];
  const std::vector<void*> to = ranges_of<void*>(frame.shard, weights);
  const bool whole = frame.flags & kWhole;
  const bool change = options_.signature.sends_updates && frame.shard < weight_shards_ && !whole;
  // A change can only be added to the step before it. One that does not fit is ignored: the next request says what this
  // worker holds, and the server answers it with all of the weights.
  const bool fits = !change || (shard.held != kNone && shard.held + 1 == frame.step);
  const std::span<const std::byte> message = message_part(frame, payload);
  try {
    if (whole)
      shard.whole->decode(message, to);
    else if (fits)
      shard.down.runner(message).decode(message, to, change ? Write::add : Write::set);
    if (fits && frame.tail > 0) shard.up.learning().restore(tail_part(frame, payload));
    if (fits) shard.at = shard.held = frame.step;
  } catch (const Error& error) {
    throw LinkLost(fmt::format("weights from the server: {}", error.what()));
  }
  times_.decode += seconds_since(begin);
}

// What has become of an update.
void Client::take_status(const Frame& frame) {
  SentUpdate* update = log_.find(frame.sequence);
  if (!update) return;
  SentShard& sent = update->shards[frame.shard];
  if (frame.status == UpdateStatus::applied || frame.status == UpdateStatus::again) {
    sent.state = SentShard::State::applied;
    sent.applied_at = frame.step;
    ++counts_.applied;
  } else if (frame.status == UpdateStatus::late || frame.status == UpdateStatus::corrupt) {
    ++(frame.status == UpdateStatus::late ? counts_.late : counts_.corrupt);
    if (sent.state == SentShard::State::open) refund(*update, frame.shard);
  }
}

}  // namespace gradwire::server
