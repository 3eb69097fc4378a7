// SPDX-License-Identifier: Apache-2.0
#include "server/client.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <thread>

#include "gradwire/error.h"
#include "server/clock.h"
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
      buffer_plan_(buffer_specs(options_.signature)),
      buffer_runner_(make_runner(buffer_plan_, {})) {
  for (const Variable& one : options_.signature.parameters) {
    residuals_.emplace_back(one.count());
    next_residuals_.emplace_back(one.count());
    name_hashes_.push_back(hash_name(one.name));
  }
}

Client::~Client() = default;

// Parts are cut as the server says, once.
void Client::cut() {
  cuts_ = cut_parts(options_.signature, part_elements_);
  weight_parts_ = options_.signature.pools ? cuts_.size() / 2 : cuts_.size();
  const Device device{.threads = options_.threads};
  for (const Cut& one : cuts_) {
    PartSide side;
    side.up_plan = std::make_unique<Plan>(specs_of(options_.signature, one, Way::up));
    side.down_plan = std::make_unique<Plan>(specs_of(options_.signature, one, Way::down));
    side.whole_plan = std::make_unique<Plan>(specs_of(options_.signature, one, Way::whole));
    side.up = make_runner(*side.up_plan, device);
    side.down = make_runner(*side.down_plan, device);
    side.whole = make_runner(*side.whole_plan, device);
    sides_.push_back(std::move(side));
  }
}

template <class Pointer>
std::vector<Pointer> Client::pieces(size_t part, std::span<float* const> tensors) const {
  std::vector<Pointer> list;
  for (const Piece& piece : cuts_[part].pieces) list.push_back(tensors[piece.parameter] + piece.first);
  return list;
}

std::vector<float*> Client::residual_pointers() {
  std::vector<float*> list;
  for (std::vector<float>& one : residuals_) list.push_back(one.data());
  return list;
}

double Client::residual_sum(size_t part) const {
  double sum = 0;
  for (const Piece& piece : cuts_[part].pieces)
    sum += signed_sum(std::span(residuals_[piece.parameter]).subspan(piece.first, piece.count),
                      name_hashes_[piece.parameter], piece.first);
  return sum;
}

Tally Client::tally() const {
  Tally sum;
  for (size_t p = 0; p < weight_parts_; ++p) {
    sum.computed += sides_[p].tally.computed;
    sum.squares += sides_[p].tally.squares;
    sum.residual += gone_ ? 0 : residual_sum(p);
  }
  return sum;
}

ReduceMemory Client::memory() const {
  ReduceMemory memory;
  for (const auto& one : residuals_) memory.residuals += 8 * one.size();
  for (const Entry& entry : log_)
    for (const Sent& sent : entry.parts)
      if (sent.message) memory.messages += sent.message->size();
  return memory;
}

uint64_t Client::step() const { return async_ ? local_step_ : sides_[0].at; }

double Client::bits() const {
  uint64_t bytes = 0;
  for (size_t p = 0; p < weight_parts_; ++p) bytes += sides_[p].up_plan->message_bytes();
  return 8.0 * static_cast<double>(bytes) / static_cast<double>(std::max<uint64_t>(1, options_.signature.elements()));
}

// The connection.

double Client::patience_left() const {
  return until_ ? std::min(options_.patience_s, std::chrono::duration<double>(*until_ - Clock::now()).count())
                : options_.patience_s;
}

template <class Work>
void Client::persist(const Work& work) {
  auto lost = Clock::now();
  std::chrono::milliseconds pause = 50ms;
  while (true) {
    try {
      if (!link_) connect();
      work();
      return;
    } catch (const LinkLost& failure) {
      if (link_) lost = Clock::now();  // it had worked
      if (link_ && seconds_since(connected_) > 5) pause = 50ms;
      link_.reset();
      if (seconds_since(lost) > options_.patience_s || patience_left() <= 0)
        throw Error(ErrorKind::engine,
                    fmt::format("the server cannot be reached for {:.0f} s: {}", seconds_since(lost), failure.what()),
                    "server");
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::milliseconds(2000));
    }
  }
}

void Client::connect() {
  std::unique_ptr<Link> link = options_.dial();
  const nlohmann::json hello = {{"id", id_}, {"name", options_.name}, {"signature", options_.signature.json()}};
  link->send({.kind = Kind::hello}, text_blob(hello));
  const auto asked = Clock::now();
  Frame frame;
  Blob payload;
  while (true) {  // it may be a while until somebody has brought the first weights
    if (!link->receive(frame, payload, until_ ? 100ms : 1000ms)) {
      if (seconds_since(asked) > options_.patience_s || patience_left() <= 0)
        throw LinkLost("the server does not say welcome");
      continue;
    }
    if (frame.kind == Kind::welcome) break;
  }
  if (joined_) ++counts_.reconnects;
  link_ = std::move(link);
  connected_ = Clock::now();
  for (PartSide& side : sides_) side.asked = false;
  greet(read_text(*payload));
}

void Client::greet(const nlohmann::json& text) {
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
    if (cuts_.empty()) {
      if (elements == 0) throw Error(ErrorKind::frame, "bad welcome: part_elements is 0", "part_elements");
      part_elements_ = elements;
      cut();
    }
    if (elements != part_elements_ || versions.size() != cuts_.size() || sequence.size() != cuts_.size() ||
        durable.size() != cuts_.size())
      throw Error(ErrorKind::engine,
                  "the server now cuts the model otherwise: it is not the one that this worker joined", "server");
    for (size_t p = 0; p < cuts_.size(); ++p) {
      PartSide& side = sides_[p];
      if (run != run_) side.held = kNone;  // another process: what it calls step n may be other weights
      side.version = versions[p];
      side.durable = durable[p];
      if (p >= weight_parts_) {
        side.round = std::max(side.round, versions[p]);
        if (side.pooled && versions[p] <= side.pooled_round) pool_again_ = true;
      }
      for (Entry& entry : log_) {
        if (p >= weight_parts_) break;
        Sent& sent = entry.parts[p];
        if (sent.state == State::folded) continue;
        const bool known = entry.sequence <= sequence[p];
        if (known && sent.state == State::open) sent.settled_at = versions[p];
        if (!known && sent.state == State::applied) ++counts_.replayed;
        sent.state = known ? State::applied : State::open;
      }
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
  if (payload && (frame.kind == Kind::update || frame.kind == Kind::handover || frame.kind == Kind::initial))
    counts_.messages_up += payload->size();
}

// Waits for one frame, then takes all that are there.
void Client::listen(std::span<float* const> weights, std::chrono::milliseconds patience) {
  Frame frame;
  Blob payload;
  if (patience_left() <= 0) throw Error(ErrorKind::engine, "the server does not answer in time", "server");
  if (until_) patience = std::min(patience, 100ms);
  while (true) {
    const auto begin = Clock::now();
    const bool came = link_->receive(frame, payload, patience);
    times_.wait += seconds_since(begin);
    if (!came) return;
    handle(frame, payload, weights);
    patience = 0ms;
  }
}

void Client::handle(const Frame& frame, const Blob& payload, std::span<float* const> weights) {
  if (frame.kind == Kind::buffers) {
    buffers_ = payload;
    return;
  }
  if (frame.kind == Kind::notice) {
    if (payload && read_text(*payload).value("left", false)) gone_ = true;
    return;
  }
  if (frame.kind == Kind::durable) {
    const nlohmann::json text = read_text(*payload);
    const auto list = text.find("durable");
    if (list != text.end() && list->is_array() && list->size() == sides_.size())
      for (size_t p = 0; p < sides_.size(); ++p)
        if ((*list)[p].is_number_unsigned()) sides_[p].durable = (*list)[p].get<uint64_t>();
    return forget_durable();
  }
  if (frame.kind != Kind::weights || frame.part >= sides_.size())
    throw LinkLost("the server says what a server does not say");
  PartSide& side = sides_[frame.part];
  if (frame.sequence == side.asked_for) side.asked = false;
  side.version = frame.step;
  if (frame.part >= weight_parts_) side.round = std::max(side.round, frame.step);
  side.durable = frame.held;
  if (frame.part == 0) keeper_ = frame.flags & kKeeper;
  if (payload && !payload->empty()) {
    counts_.messages_down += payload->size();
    const auto begin = Clock::now();
    const std::vector<void*> to = pieces<void*>(frame.part, weights);
    const bool change = options_.signature.sends_updates && frame.part < weight_parts_ && !(frame.flags & kWhole);
    try {
      if (frame.flags & kWhole)
        side.whole->decode(*payload, to);
      else if (!change)
        side.down->decode(*payload, to);
      else if (side.held != kNone && side.held + 1 == frame.step)
        side.down->decode(*payload, to, Write::add);
      if (!change || side.held + 1 == frame.step) side.at = side.held = frame.step;
    } catch (const Error& error) {
      throw LinkLost(fmt::format("weights from the server: {}", error.what()));
    }
    times_.decode += seconds_since(begin);
  }
  if (frame.sequence != 0 && frame.part < weight_parts_)
    for (Entry& entry : log_) {
      if (entry.sequence != frame.sequence) continue;
      Sent& sent = entry.parts[frame.part];
      if (frame.verdict == Verdict::applied || frame.verdict == Verdict::again) {
        sent.state = State::applied;
        sent.settled_at = frame.step;
        ++counts_.applied;
      } else if (frame.verdict == Verdict::late || frame.verdict == Verdict::corrupt) {
        ++(frame.verdict == Verdict::late ? counts_.late : counts_.corrupt);
        if (sent.state == State::open) fold(entry, frame.part);
      }
    }
  forget_durable();
}

// Updates.

void Client::encode_part(Entry& entry, size_t p, std::span<const float* const> updates) {
  const auto begin = Clock::now();
  PartSide& side = sides_[p];
  Sent& sent = entry.parts[p];
  std::vector<const void*> in, before;
  std::vector<void*> after;
  for (const Piece& piece : cuts_[p].pieces) {
    const std::span update(updates[piece.parameter] + piece.first, piece.count);
    side.tally.computed += signed_sum(update, name_hashes_[piece.parameter], piece.first);
    side.tally.squares += square_sum(update);
    in.push_back(update.data());
    before.push_back(residuals_[piece.parameter].data() + piece.first);
    after.push_back(next_residuals_[piece.parameter].data() + piece.first);
  }
  if (!std::isfinite(side.tally.squares)) throw Error(ErrorKind::usage, "an update is not finite", "updates");
  std::vector<std::byte> message(side.up_plan->message_bytes());
  const Residuals residuals{before, after, DType::f32};
  side.up->encode(in,
                  {.seed = options_.signature.seed, .step = sent.step, .stage = 0, .rank = slot_, .world = slot_ + 1},
                  message, &residuals);
  for (const Piece& piece : cuts_[p].pieces)
    std::copy_n(next_residuals_[piece.parameter].begin() + static_cast<std::ptrdiff_t>(piece.first), piece.count,
                residuals_[piece.parameter].begin() + static_cast<std::ptrdiff_t>(piece.first));
  side.tally.residual = residual_sum(p);
  sent.message = make_blob(std::move(message));
  sent.tally = side.tally;
  times_.encode += seconds_since(begin);
}

// What was refused goes back to where it came from. Later updates that were encoded without it say so in their tallies.
void Client::fold(Entry& entry, size_t p) {
  PartSide& side = sides_[p];
  const double before = residual_sum(p);
  const std::vector<float*> residuals = residual_pointers();
  side.up->decode(*entry.parts[p].message, pieces<void*>(p, residuals), Write::add);
  const double after = residual_sum(p);
  side.tally.residual = after;
  for (Entry& later : log_)
    if (later.sequence > entry.sequence) later.parts[p].tally.residual += after - before;
  entry.parts[p].state = State::folded;
  entry.parts[p].message = nullptr;
}

void Client::forget_durable() {
  const auto over = [this](const Entry& entry) {
    for (size_t p = 0; p < weight_parts_; ++p) {
      const Sent& sent = entry.parts[p];
      if (sent.state == State::open || (sent.state == State::applied && sent.settled_at > sides_[p].durable))
        return false;
    }
    return true;
  };
  while (!log_.empty() && over(log_.front())) log_.pop_front();
}

Client::Entry* Client::oldest_open(size_t part) {
  for (Entry& entry : log_)
    if (entry.parts[part].state == State::open && entry.parts[part].message) return &entry;
  return nullptr;
}

// The next thing to ask the server for one part: take an update, or give weights of `target`. A replay only brings a
// restarted server to where the others need it, and wants no weights.
void Client::ask(size_t p, uint64_t target, bool replay) {
  PartSide& side = sides_[p];
  if (side.asked) return;
  Frame frame{.kind = Kind::pull, .part = static_cast<uint32_t>(p), .step = target, .held = side.held};
  Blob payload;
  Entry* entry = oldest_open(p);
  while (entry && !async_ && side.version > entry->parts[p].step) {  // its step is over
    ++counts_.late;
    fold(*entry, p);
    entry = oldest_open(p);
  }
  if (entry) {
    const Sent& sent = entry->parts[p];
    frame.step = sent.step;
    if (!async_ && side.version < sent.step) {
      frame.flags = kQuiet;  // a restarted server has to come here first, by what others send again
    } else {
      frame.kind = Kind::update;
      frame.sequence = entry->sequence;
      frame.tally = sent.tally;
      if (replay || entry != &log_.back()) frame.flags = kQuiet;
      payload = sent.message;
    }
  } else if (replay || (side.held != kNone && (async_ || side.held >= target))) {
    return;
  }
  side.asked = true;
  side.asked_for = frame.sequence;
  send(frame, payload);
}

// Until every update has its verdict, and weights of one step, `target` or a later one, are here.
void Client::settle(uint64_t target, std::span<float* const> weights) {
  pool_again();
  while (true) {
    uint64_t top = async_ ? 0 : target;
    if (!async_)
      for (size_t p = 0; p < weight_parts_; ++p) top = std::max(top, sides_[p].version);
    bool done = true;
    for (size_t p = 0; p < weight_parts_; ++p) {
      ask(p, top);
      done = done && !sides_[p].asked;
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
  for (size_t p = 0; p < weight_parts_; ++p) {
    std::vector<std::byte> message(sides_[p].whole_plan->message_bytes());
    sides_[p].whole->encode(pieces<const void*>(p, weights), {}, message);
    send({.kind = Kind::initial, .part = static_cast<uint32_t>(p)}, make_blob(std::move(message)));
  }
  initial_ = false;
}

uint64_t Client::exchange(std::span<const float* const> updates, std::span<float* const> weights) {
  GW_CHECK(joined_ && updates.size() == residuals_.size() && weights.size() == residuals_.size());
  const uint64_t target = async_ ? 0 : step() + 1;
  Entry& entry = log_.emplace_back(Entry{++sequence_, std::vector<Sent>(weight_parts_)});
  for (size_t p = 0; p < weight_parts_; ++p) entry.parts[p].step = sides_[p].at;
  // Parts leave as they are encoded, and come back while others are.
  for (size_t p = 0; p < weight_parts_; ++p) {
    encode_part(entry, p, updates);
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

uint64_t Client::skip(std::span<float* const> weights) {
  const uint64_t target = async_ ? 0 : step() + 1;
  if (async_)
    for (PartSide& side : sides_) side.held = kNone;
  persist([&] { settle(target, weights); });
  ++local_step_;
  return step();
}

void Client::pool(std::span<float* const> second) {
  GW_CHECK(options_.signature.pools);
  const uint64_t sequence = ++sequence_;
  pool_again_ = false;  // whoever waited for the round before has gone on, or nobody would get here
  for (size_t p = weight_parts_; p < cuts_.size(); ++p) {
    PartSide& side = sides_[p];
    std::vector<std::byte> message(side.up_plan->message_bytes());
    side.up->encode(pieces<const void*>(p, second), {.step = side.round, .rank = slot_, .world = slot_ + 1}, message);
    side.pooled = make_blob(std::move(message));
    side.pooled_round = side.round;
    side.pooled_sequence = sequence;
    side.held = kNone;
  }
  persist([&] {
    for (size_t p = weight_parts_; p < cuts_.size(); ++p) {
      PartSide& side = sides_[p];
      if (side.held != kNone || side.asked) continue;
      const bool over = side.version > side.pooled_round;
      side.asked = true;
      side.asked_for = over ? 0 : sequence;
      send({.kind = over ? Kind::pull : Kind::update,
            .part = static_cast<uint32_t>(p),
            .step = over ? side.version : side.pooled_round,
            .sequence = side.asked_for},
           over ? nullptr : side.pooled);
    }
    const auto missing = [&] {
      return std::any_of(sides_.begin() + static_cast<std::ptrdiff_t>(weight_parts_), sides_.end(),
                         [](const PartSide& side) { return side.held == kNone; });
    };
    while (missing()) {
      for (size_t p = 0; p < weight_parts_; ++p) ask(p, 0, true);  // others may not come to this round without them
      listen(second, 1000ms);
    }
  });
  pool_again_ = false;
}

// A server that was killed between its answers to the same round has told some of us, and must tell the others the same.
void Client::pool_again() {
  if (!std::exchange(pool_again_, false)) return;
  for (size_t p = weight_parts_; p < cuts_.size(); ++p) {
    const PartSide& side = sides_[p];
    if (!side.pooled || side.version > side.pooled_round) continue;
    send({.kind = Kind::update,
          .flags = kQuiet,
          .part = static_cast<uint32_t>(p),
          .step = side.pooled_round,
          .sequence = side.pooled_sequence},
         side.pooled);
  }
}

void Client::report(const nlohmann::json& text) {
  if (!link_) return;
  try {
    link_->send({.kind = Kind::report}, text_blob(text));
  } catch (const LinkLost&) {  // the next exchange sees it too
  }
}

void Client::send_buffers(std::span<const float* const> buffers) {
  if (!link_ || buffers.empty()) return;
  std::vector<std::byte> message(buffer_plan_.message_bytes());
  std::vector<const void*> in(buffers.begin(), buffers.end());
  buffer_runner_->encode(in, {}, message);
  try {
    link_->send({.kind = Kind::buffers}, make_blob(std::move(message)));
  } catch (const LinkLost&) {
  }
}

bool Client::take_buffers(std::span<float* const> buffers) const {
  if (!buffers_) return false;
  std::vector<void*> out(buffers.begin(), buffers.end());
  buffer_runner_->decode(*buffers_, out);
  return true;
}

bool Client::leave(double wait_s) {
  GW_CHECK(joined_);
  const std::vector<float*> residuals = residual_pointers();
  std::vector<std::vector<float>> unused;  // weights may still come; nobody looks at them
  std::vector<float*> weights;
  for (const auto& one : residuals_) weights.push_back(unused.emplace_back(one.size()).data());
  const uint64_t sequence = ++sequence_;
  until_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(wait_s));
  try {
    persist([&] {
      settle(0, weights);
      for (size_t p = 0; p < weight_parts_; ++p) {
        std::vector<std::byte> message(sides_[p].whole_plan->message_bytes());
        sides_[p].whole->encode(pieces<const void*>(p, residuals), {.step = sides_[p].version}, message);
        Tally tally = sides_[p].tally;
        tally.residual = 0;
        sides_[p].asked = true;
        sides_[p].asked_for = sequence;
        send({.kind = Kind::handover,
              .part = static_cast<uint32_t>(p),
              .step = sides_[p].version,
              .sequence = sequence,
              .tally = tally},
             make_blob(std::move(message)));
      }
      while (std::any_of(sides_.begin(), sides_.end(), [](const PartSide& side) { return side.asked; }))
        listen(weights, 1000ms);
      send({.kind = Kind::goodbye}, nullptr);
      while (!gone_) listen(weights, 1000ms);
    });
  } catch (const Error&) {
    // A server that cannot be reached any more, or will not have us: it is the same to one who leaves.
  }
  link_.reset();
  until_.reset();
  return gone_;
}

}  // namespace gradwire::server
