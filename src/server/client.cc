// SPDX-License-Identifier: Apache-2.0
#include "server/client.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <utility>

#include "core/check.h"
#include "core/clock.h"
#include "gradwire/error.h"
#include "server/ledger.h"

namespace gradwire::server {
namespace {

using namespace std::chrono_literals;

std::string random_id() {
  std::random_device random;
  std::string id;
  for (int i = 0; i < 4; ++i) id += fmt::format("{:08x}", random());
  return id;
}

}  // namespace

Client::Client(ClientOptions options)
    : options_(std::move(options)),
      id_(options_.id.empty() ? random_id() : options_.id),
      residuals_(options_.signature),
      buffer_plan_(buffer_specs(options_.signature)),
      buffer_runner_(make_runner(buffer_plan_, {})) {
  for (const Variable& one : options_.signature.parameters) name_hashes_.push_back(hash_name(one.name));
}

Client::~Client() = default;

// The server says how large shards are; the rest follows from the signature, and stays for the life of the worker.
void Client::make_shards() {
  layouts_ = shard_layouts(options_.signature, shard_elements_);
  weight_shards_ = options_.signature.pools ? layouts_.size() / 2 : layouts_.size();
  const Device device{.threads = options_.threads};
  for (const ShardLayout& layout : layouts_) {
    const auto specs = [&](ShardMessage message) { return specs_of(options_.signature, layout, message); };
    ClientShard shard{
        .up = ShardWriter(specs(ShardMessage::up), Direction::up, device, run_of(options_.signature, layout, async_)),
        .refunds = ShardReader(specs(ShardMessage::up), device),
        .down = ShardReader(specs(ShardMessage::down), device),
        .whole_plan = std::make_unique<Plan>(specs(ShardMessage::whole)),
        .whole = nullptr,
        .tally = {},
        .pooled = nullptr};
    shard.whole = make_runner(*shard.whole_plan, device);
    shards_.push_back(std::move(shard));
  }
}

Tally Client::tally() const {
  Tally sum;
  for (size_t p = 0; p < weight_shards_; ++p) {
    sum.computed += shards_[p].tally.computed;
    sum.squares += shards_[p].tally.squares;
    sum.residual += gone_ ? 0 : residuals_.sum(layouts_[p]);
  }
  return sum;
}

ReduceMemory Client::memory() const {
  ReduceMemory memory;
  memory.residuals = residuals_.bytes();
  memory.messages = log_.bytes();
  return memory;
}

uint64_t Client::step() const { return async_ ? local_step_ : shards_[0].at; }

double Client::bits() const {
  uint64_t bytes = 0;
  for (size_t p = 0; p < weight_shards_; ++p) bytes += shards_[p].up.message_bytes();
  return 8.0 * static_cast<double>(bytes) / static_cast<double>(std::max<uint64_t>(1, options_.signature.elements()));
}

// ---- Updates

void Client::encode_shard(SentUpdate& update, size_t p, std::span<const float* const> updates) {
  const auto begin = SteadyClock::now();
  ClientShard& shard = shards_[p];
  SentShard& sent = update.shards[p];
  std::vector<const void*> in;
  for (const ParameterRange& range : layouts_[p].ranges) {
    const std::span values(updates[range.parameter] + range.first, range.count);
    shard.tally.computed += signed_sum(values, name_hashes_[range.parameter], range.first);
    shard.tally.squares += square_sum(values);
    in.push_back(values.data());
  }
  if (!std::isfinite(shard.tally.squares)) throw Error(ErrorKind::usage, "an update is not finite", "updates");
  Runner& runner = shard.up.runner(sent.step, rate_);
  std::vector<std::byte> message(shard.up.message_bytes());
  const auto begun = residuals_.begin(sent.step, runner.plan().tensors());
  runner.encode(in, {.seed = options_.signature.seed, .step = sent.step, .stage = 0, .rank = slot_, .world = slot_ + 1},
                message, &begun->residuals);
  // Without steps a worker does not meet every version: it makes up for those that it has passed over.
  const uint64_t first = async_ ? std::min(shard.observed, sent.step) : sent.step;
  const std::vector<std::byte> statistics =
      shard.up.learning().observe(runner, first, sent.step, in, &begun->residuals, message);
  shard.observed = sent.step + 1;
  // The update counts as applied from here on. Should the server refuse it, refund() gives everything back.
  const WorkerResiduals::Dropped dropped = residuals_.commit(sent.step, layouts_[p]);
  shard.tally.computed -= dropped.sum;
  shard.tally.squares += dropped.squares;
  message.insert(message.end(), statistics.begin(), statistics.end());
  sent.tail = statistics.size();
  sent.rate = options_.signature.sgd ? static_cast<float>(std::max(rate_, 0.0)) : 0.0f;
  shard.tally.residual = residuals_.sum(layouts_[p]);
  sent.message = make_blob(std::move(message));
  sent.tally = shard.tally;
  times_.encode += seconds_since(begin);
}

// What was refused is decoded into the residual again, from which it goes out with later updates. An update that a
// restarted server has forgotten can be refused when newer ones have been encoded. Without error feedback, what
// compression changed in it is not known any more then.
void Client::refund(SentUpdate& update, size_t p) {
  ClientShard& shard = shards_[p];
  SentShard& sent = update.shards[p];
  const double before = residuals_.sum(layouts_[p]);
  const auto message = std::span(*sent.message).first(sent.message->size() - sent.tail);
  shard.refunds.runner(message).decode(message, ranges_of<void*>(p, residuals_.pointers()), Write::add);
  if (log_.is_newest(update)) shard.tally.computed += residuals_.take_back(layouts_[p]);
  shard.tally.residual = residuals_.sum(layouts_[p]);
  log_.add_to_later_tallies(update, p, shard.tally.residual - before);
  sent.state = SentShard::State::refunded;
  sent.message = nullptr;
}

void Client::drop_durable() {
  log_.drop_durable([this](size_t shard) { return shards_[shard].durable; });
}

// The next request for one shard: take an update, or give weights of `target`. With `replay`, only updates are sent, to
// bring a restarted server to where others need it, and no weights are wanted.
void Client::ask(size_t p, uint64_t target, bool replay, uint8_t flags) {
  ClientShard& shard = shards_[p];
  if (shard.asked) return;
  Frame frame{
      .kind = FrameKind::pull, .flags = flags, .shard = static_cast<uint32_t>(p), .step = target, .held = shard.held};
  Blob payload;
  SentUpdate* update = log_.oldest_open(p);
  // The step of an update may have been closed while the connection was down.
  while (update && !async_ && shard.version > update->shards[p].step) {
    ++counts_.late;
    refund(*update, p);
    update = log_.oldest_open(p);
  }
  if (update) {
    const SentShard& sent = update->shards[p];
    frame.step = sent.step;
    frame.flags = 0;
    if (!async_ && shard.version < sent.step) {
      // A restarted server is behind this update. Other workers send it what is missing; wait until it has come here.
      frame.flags = kQuiet;
    } else {
      frame.kind = FrameKind::update;
      frame.sequence = update->sequence;
      frame.tally = sent.tally;
      frame.rate = sent.rate;
      frame.tail = sent.tail;
      if (replay || !log_.is_newest(*update)) frame.flags = kQuiet;  // weights of steps that are over are of no use
      payload = sent.message;
    }
  } else if (replay || (shard.held != kNone && (async_ || shard.held >= target))) {
    return;  // there is nothing to send, and the weights are here
  }
  shard.asked = true;
  shard.asked_for = frame.sequence;
  send(frame, payload);
}

// Until it is known what became of every update, and all shards hold the weights of one step: `target` or a later one.
void Client::settle(uint64_t target, std::span<float* const> weights, uint8_t flags) {
  resend_pooled();
  while (true) {
    // If one shard was closed without this worker, the others have to follow: weights of two steps do not mix.
    uint64_t top = async_ ? 0 : target;
    if (!async_)
      for (size_t p = 0; p < weight_shards_; ++p) top = std::max(top, shards_[p].version);
    bool done = true;
    for (size_t p = 0; p < weight_shards_; ++p) {
      ask(p, top, false, flags);
      done = done && !shards_[p].asked;
    }
    if (done) return;
    listen(weights, 1000ms);
  }
}

uint64_t Client::join(std::span<float* const> weights) {
  persist([&] {
    if (initial_) send_initial(weights);
    settle(0, weights);
  });
  joined_ = true;
  return step();
}

void Client::send_initial(std::span<float* const> weights) {
  for (size_t p = 0; p < weight_shards_; ++p) {
    std::vector<std::byte> message(shards_[p].whole_plan->message_bytes());
    shards_[p].whole->encode(ranges_of<const void*>(p, weights), {}, message);
    send({.kind = FrameKind::initial, .shard = static_cast<uint32_t>(p)}, make_blob(std::move(message)));
  }
  initial_ = false;
}

uint64_t Client::exchange(std::span<const float* const> updates, std::span<float* const> weights) {
  const size_t parameters = options_.signature.parameters.size();
  GW_CHECK(joined_ && updates.size() == parameters && weights.size() == parameters);
  const uint64_t target = async_ ? 0 : step() + 1;
  SentUpdate& update = log_.append(++sequence_, weight_shards_);
  for (size_t p = 0; p < weight_shards_; ++p) update.shards[p].step = shards_[p].at;
  // Each shard leaves as soon as it is encoded, and comes back while the next ones are. A connection that breaks here
  // is not mended before all shards are encoded: what is sent then includes them.
  for (size_t p = 0; p < weight_shards_; ++p) {
    encode_shard(update, p, updates);
    if (!link_) continue;
    try {
      ask(p, target);
      listen(weights, 0ms);
    } catch (const LinkLost&) {
      link_.reset();
    }
  }
  persist([&] { settle(target, weights); });
  ++local_step_;
  return step();
}

uint64_t Client::skip(std::span<float* const> weights, SkipReason why) {
  const uint64_t target = async_ ? 0 : step() + 1;
  if (async_)
    for (ClientShard& shard : shards_) shard.held = kNone;  // so that settle() asks for weights at all
  persist([&] { settle(target, weights, why == SkipReason::not_finite ? kNotFinite : 0); });
  ++local_step_;
  return step();
}

// ---- Second moments

void Client::pool(std::span<float* const> second) {
  GW_CHECK(options_.signature.pools);
  const uint64_t sequence = ++sequence_;
  resend_pooled_ = false;  // no worker waits for the round before, or this one would not have begun
  for (size_t p = weight_shards_; p < layouts_.size(); ++p) {
    ClientShard& shard = shards_[p];
    Runner& runner = shard.up.runner(shard.round);
    std::vector<std::byte> message(shard.up.message_bytes());
    runner.encode(ranges_of<const void*>(p, second), {.step = shard.round, .rank = slot_, .world = slot_ + 1}, message);
    shard.pooled = make_blob(std::move(message));
    shard.pooled_round = shard.round;
    shard.pooled_sequence = sequence;
    shard.held = kNone;
  }
  persist([&] {
    for (size_t p = weight_shards_; p < layouts_.size(); ++p) {
      ClientShard& shard = shards_[p];
      if (shard.held != kNone || shard.asked) continue;
      const bool over = shard.version > shard.pooled_round;  // closed without this worker: take the mean of the others
      shard.asked = true;
      shard.asked_for = over ? 0 : sequence;
      send({.kind = over ? FrameKind::pull : FrameKind::update,
            .shard = static_cast<uint32_t>(p),
            .step = over ? shard.version : shard.pooled_round,
            .sequence = shard.asked_for},
           over ? nullptr : shard.pooled);
    }
    const auto missing = [&] {
      return std::any_of(shards_.begin() + static_cast<std::ptrdiff_t>(weight_shards_), shards_.end(),
                         [](const ClientShard& shard) { return shard.held == kNone; });
    };
    while (missing()) {
      // A restarted server may still need updates of this worker before the others can come to this round.
      for (size_t p = 0; p < weight_shards_; ++p) ask(p, 0, true);
      listen(second, 1000ms);
    }
  });
  resend_pooled_ = false;
}

// A server that was killed while it answered a round has told some workers the mean, and must tell the others the same:
// those who have it send what they gave once more.
void Client::resend_pooled() {
  if (!std::exchange(resend_pooled_, false)) return;
  for (size_t p = weight_shards_; p < layouts_.size(); ++p) {
    const ClientShard& shard = shards_[p];
    if (!shard.pooled || shard.version > shard.pooled_round) continue;
    send({.kind = FrameKind::update,
          .flags = kQuiet,
          .shard = static_cast<uint32_t>(p),
          .step = shard.pooled_round,
          .sequence = shard.pooled_sequence},
         shard.pooled);
  }
}

// ---- Reports, buffers, leaving

void Client::report(const nlohmann::json& text) {
  if (!link_) return;
  try {
    link_->send({.kind = FrameKind::report}, text_blob(text));
  } catch (const LinkLost&) {  // the next exchange sees it too
  }
}

void Client::send_buffers(std::span<const float* const> buffers) {
  if (!link_ || buffers.empty()) return;
  std::vector<std::byte> message(buffer_plan_.message_bytes());
  std::vector<const void*> in(buffers.begin(), buffers.end());
  buffer_runner_->encode(in, {}, message);
  try {
    link_->send({.kind = FrameKind::buffers}, make_blob(std::move(message)));
  } catch (const LinkLost&) {  // likewise; buffers are sent again in a while
  }
}

bool Client::take_buffers(std::span<float* const> buffers) const {
  if (!buffers_) return false;
  std::vector<void*> out(buffers.begin(), buffers.end());
  buffer_runner_->decode(*buffers_, out);
  return true;
}

void Client::send_residual(uint64_t sequence) {
  const std::vector<float*> residuals = residuals_.pointers();
  for (size_t p = 0; p < weight_shards_; ++p) {
    ClientShard& shard = shards_[p];
    std::vector<std::byte> message(shard.whole_plan->message_bytes());
    shard.whole->encode(ranges_of<const void*>(p, residuals), {.step = shard.version}, message);
    Tally tally = shard.tally;
    tally.residual = 0;
    shard.asked = true;
    shard.asked_for = sequence;
    send({.kind = FrameKind::residual,
          .shard = static_cast<uint32_t>(p),
          .step = shard.version,
          .sequence = sequence,
          .tally = tally,
          .rate = options_.signature.sgd ? static_cast<float>(std::max(rate_, 0.0)) : 0.0f},
         make_blob(std::move(message)));
  }
}

bool Client::leave(double wait_s) {
  GW_CHECK(joined_);
  std::vector<std::vector<float>> unused;  // weights may still come; they are decoded, and not used
  std::vector<float*> weights;
  for (const Variable& one : options_.signature.parameters) weights.push_back(unused.emplace_back(one.count()).data());
  const uint64_t sequence = ++sequence_;
  until_ =
      SteadyClock::now() + std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(wait_s));
  try {
    // If the connection breaks, all of it is repeated; the server drops by its number what it has.
    persist([&] {
      settle(0, weights);
      send_residual(sequence);
      while (std::any_of(shards_.begin(), shards_.end(), [](const ClientShard& shard) { return shard.asked; }))
        listen(weights, 1000ms);
      send({.kind = FrameKind::goodbye}, nullptr);
      while (!gone_) listen(weights, 1000ms);
    });
  } catch (const Error&) {
    // The server cannot be reached any more, or refuses this worker. To a worker that leaves it is the same.
  }
  link_.reset();
  until_.reset();
  return gone_;
}

}  // namespace gradwire::server
