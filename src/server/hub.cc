// SPDX-License-Identifier: Apache-2.0
// Sessions and members: who comes, with which model, who brings the first weights, who goes away.
#include "server/hub.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "gradwire/error.h"
#include "gradwire/message.h"
#include "io/safetensors.h"

namespace gradwire::server {
namespace {

constexpr size_t kMaxName = 128;
constexpr size_t kMaxGone = 4096;  // members that are remembered after they went away
constexpr size_t kStrands = 4096;  // parts beyond share them

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

Hub::Model::Model(const Signature& given, uint64_t part_elements)
    : signature(given), cuts(cut_parts(given, part_elements)), desks(cuts.size()), buffer_plan(buffer_specs(given)) {
  for (size_t i = 0; i < cuts.size(); ++i) desks[i].part = std::make_unique<Part>(signature, cuts[i]);
  buffer_runner = make_runner(buffer_plan, {});
  versions.resize(cuts.size());
  durable.resize(cuts.size());
  applied.resize(cuts.size());
  tallies.resize(cuts.size());
  bytes.resize(cuts.size());
  ready.resize(cuts.size());
  open.resize(cuts.size());
  for (size_t i = 0; i < cuts.size(); ++i) {
    ready[i] = desks[i].part->ready();
    bytes[i] = desks[i].part->bytes();
  }
}

size_t Hub::Model::weight_parts() const { return signature.pools ? cuts.size() / 2 : cuts.size(); }

bool Hub::Model::whole() const {
  return std::all_of(ready.begin(), ready.end(), [](char one) { return one; });
}

uint64_t Hub::Model::step() const {
  return *std::min_element(versions.begin(), versions.begin() + static_cast<std::ptrdiff_t>(weight_parts()));
}

Hub::Hub(HubOptions options) : options_(std::move(options)) {
  if (options_.threads <= 0) options_.threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::random_device random;
  run_ = (uint64_t{random()} << 32 | random()) >> 1;
  strands_ = std::make_unique<Strands>(options_.threads, kStrands);
  load();
  saver_ = std::thread([this] { save_loop(); });
  ticker_ = std::thread([this] { tick(); });
}

Hub::~Hub() {
  {
    const Lock lock(mutex_);
    save_stop_ = stopping_ = true;
  }
  save_wake_.notify_all();
  tick_wake_.notify_all();
  saver_.join();
  ticker_.join();
  strands_->stop();  // its work may still post: the pointer stays
}

void Hub::post(uint32_t part, std::function<void()> work) { strands_->post(part % kStrands, std::move(work)); }

void Hub::say(const char* event, nlohmann::json fields) const {
  if (!options_.log) return;
  fields["event"] = event;
  const std::lock_guard lock(log_mutex_);
  options_.log(fields);
}

void Hub::count_refusal(const std::string& why) {
  const Lock lock(mutex_);
  ++refused_[why];
}

Hub::Member* Hub::member_of(const Session* session) {
  const auto slot = slots_.find(session);
  return slot == slots_.end() ? nullptr : &members_.at(slot->second);
}

uint32_t Hub::present() const {
  return static_cast<uint32_t>(std::count_if(members_.begin(), members_.end(),
                                             [](const auto& one) { return one.second.session && !one.second.left; }));
}

// The worker whose buffers are kept: of those present, the one that came first.
uint32_t Hub::keeper() const {
  for (const auto& [slot, member] : members_)
    if (member.session && !member.left) return slot;
  return ~0u;
}

void Hub::received(const std::shared_ptr<Session>& session, const Frame& frame, Blob payload,
                   std::function<void()> done) {
  try {
    if (frame.kind == Kind::hello) {
      hello(session, read_text(*payload));
      return done();
    }
    uint32_t slot;
    {
      const Lock lock(mutex_);
      Member* member = member_of(session.get());
      if (!member) throw Error(ErrorKind::frame, "bad frame: the first one must be a hello", "kind");
      slot = member->slot;
      switch (frame.kind) {
        case Kind::report:
          take_report(*member, read_text(*payload));
          break;
        case Kind::goodbye:
          goodbye(*member);
          break;
        default:
          if (!model_) throw Error(ErrorKind::frame, "bad frame: there are no weights yet", "kind");
          if (frame.kind != Kind::buffers && frame.part >= model_->cuts.size())
            throw Error(ErrorKind::frame,
                        fmt::format("bad frame: part is {}; there are {}", frame.part, model_->cuts.size()), "part");
          if ((frame.kind == Kind::update || frame.kind == Kind::handover) && frame.sequence == 0)
            throw Error(ErrorKind::frame, "bad frame: sequence is 0; updates are counted from 1", "sequence");
      }
    }
    switch (frame.kind) {
      case Kind::report:
        return done();
      case Kind::goodbye:
        recheck();  // others may have waited for it
        return done();
      case Kind::buffers:
        take_buffers(payload);
        return done();
      case Kind::initial:
        return set_initial(session, slot, frame, payload, done);
      case Kind::update:
        return take_update(session, slot, frame, std::move(payload), done);
      case Kind::pull:
        return take_pull(session, slot, frame, done);
      case Kind::handover:
        return take_handover(session, slot, frame, std::move(payload), done);
      default:
        throw Error(ErrorKind::frame, "bad frame: a worker does not say this", "kind");
    }
  } catch (const std::exception& error) {  // an Error, or no memory for what is announced
    count_refusal("corrupt");
    session->refuse(Refusal::malformed, error.what());
    done();
  }
}

void Hub::hello(const std::shared_ptr<Session>& session, const nlohmann::json& text) {
  const std::string id = text_field(text, "id", 8, 64), name = text_field(text, "name", 0, kMaxName);
  const auto found = text.find("signature");
  if (found == text.end()) throw Error(ErrorKind::frame, "bad hello: there is no signature", "signature");
  const Signature signature = Signature::parse(*found);

  Lock lock(mutex_);
  if (stopping_) return session->refuse(Refusal::stopping, "the server is stopping");
  if (slots_.contains(session.get())) throw Error(ErrorKind::frame, "bad hello: this is the second one", "kind");
  std::string difference;
  try {
    check_limits(signature, options_.limits);
    if (model_)
      difference = model_->signature.difference(signature);
    else
      adopt(signature);
  } catch (const Error& error) {
    difference = error.what();
  }
  if (!difference.empty()) {
    ++refused_["signature"];
    session->refuse(Refusal::signature, "this worker trains something else: " + difference);
    return;
  }
  Member* member = nullptr;
  for (auto& [slot, one] : members_)
    if (one.id == id) member = &one;
  if (!member && present() >= options_.max_workers) {
    ++refused_["full"];
    session->refuse(Refusal::full,
                    fmt::format("the server is full: it takes {} workers (--max-workers)", options_.max_workers));
    return;
  }
  const bool returns = member != nullptr;
  if (!member) {
    Member fresh;
    fresh.id = id;
    fresh.slot = next_slot_++;
    fresh.joined = Clock::now();
    member = &(members_[fresh.slot] = fresh);
  } else if (member->session) {  // the old connection has not been found dead yet
    member->session->refuse(Refusal::replaced, "the same worker has connected anew");
    end_session(*member);
  }
  member->name = name;
  member->session = session;
  member->left = member->lost = member->awaited = false;
  member->lags.assign(model_->cuts.size(), 0);
  // Without steps: nobody is ahead of, or behind, one who has just come.
  std::vector<uint64_t> least(model_->cuts.size(), kNone);
  for (const auto& [slot, one] : members_)
    if (one.session && one.slot != member->slot)
      for (size_t p = 0; p < least.size(); ++p) least[p] = std::min(least[p], one.clock[p]);
  for (uint64_t& clock : least) clock = clock == kNone ? 0 : clock;
  member->clock = least;
  member->here = member->last_update = Clock::now();
  slots_[session.get()] = member->slot;

  if (model_->whole())
    welcome(*member, false);
  else if (!initialiser_ || *initialiser_ == member->slot) {
    initialiser_ = member->slot;
    welcome(*member, true);
  } else if (std::find(waiting_.begin(), waiting_.end(), member->slot) == waiting_.end()) {
    waiting_.push_back(member->slot);
  }
  const nlohmann::json event = {{"worker", id.substr(0, 8)},
                                {"name", name},
                                {"slot", member->slot},
                                {"peer", session->peer()},
                                {"present", present()}};
  lock.unlock();
  say(returns ? "back" : "joined", event);
  recheck();
}

// The first worker says what is trained; a file may have the weights.
void Hub::adopt(const Signature& signature) {
  if (signature.sends_updates && options_.async)
    throw Error(ErrorKind::usage, "updates down need steps: this server has none (--mode async); send weights", "mode");
  if (signature.pools && options_.async)
    throw Error(ErrorKind::usage, "shared moments need steps: this server has none (--mode async)", "mode");
  auto model = std::make_shared<Model>(signature, options_.part_elements);
  if (!options_.init.empty()) {
    const SafetensorsFile file(options_.init);
    std::vector<std::vector<float>> values;
    for (const Variable& one : signature.parameters) {
      const auto& all = file.tensors();
      const auto found =
          std::find_if(all.begin(), all.end(), [&](const StoredTensor& t) { return t.name == one.name; });
      if (found == all.end())
        throw Error(ErrorKind::usage, fmt::format("{} has no tensor '{}'", options_.init, one.name), "init");
      if (found->shape != one.shape)
        throw Error(ErrorKind::usage, fmt::format("'{}' has another shape in {}", one.name, options_.init), "init");
      values.push_back(file.read_f32(*found));
    }
    const std::vector<std::span<const float>> spans(values.begin(), values.end());
    for (size_t p = 0; p < model->weight_parts(); ++p) {
      model->desks[p].part->set(model->cuts[p].gather(spans));
      model->ready[p] = 1;
    }
  }
  model_ = std::move(model);
}

void Hub::welcome(Member& member, bool initial) {
  // Without steps of its own a server counts updates; workers count steps, and the one that has taken most is a newcomer's measure.
  uint64_t steps = 0;
  for (const auto& [slot, one] : members_) steps = std::max<uint64_t>(steps, one.updates / model_->weight_parts());
  nlohmann::json text = {{"run", run_},
                         {"slot", member.slot},
                         {"initial", initial},
                         {"versions", model_->versions},
                         {"durable", options_.checkpoint.empty() ? model_->versions : model_->durable},
                         {"steps", steps},
                         {"part_elements", options_.part_elements},
                         {"async", options_.async}};
  Frame frame{.kind = Kind::welcome};
  // What of this worker's was applied is known to the parts: they are asked, and the answer goes out behind them.
  const std::shared_ptr<Model> model = model_;
  const std::shared_ptr<Session> session = member.session;
  struct Gathered {
    std::mutex mutex;
    std::vector<uint64_t> sequence, versions;
    size_t missing;
  };
  auto gathered = std::make_shared<Gathered>();
  gathered->sequence.resize(model->cuts.size());
  gathered->versions.resize(model->cuts.size());
  gathered->missing = model->cuts.size();
  const uint32_t slot = member.slot;
  for (uint32_t p = 0; p < model->cuts.size(); ++p)
    post(p, [model, session, gathered, p, slot, frame, text, buffers = model->buffers]() mutable {
      const Part& part = *model->desks[p].part;
      const auto row = part.rows().find(slot);
      const std::lock_guard lock(gathered->mutex);
      gathered->sequence[p] = row == part.rows().end() ? 0 : row->second.sequence;
      gathered->versions[p] = part.version();
      if (--gathered->missing > 0) return;
      text["sequence"] = gathered->sequence;
      text["versions"] = gathered->versions;
      session->send(frame, text_blob(text));
      if (buffers) session->send({.kind = Kind::buffers}, buffers);
    });
}

// All of one worker's, or what a mixture of two begins with would be nobody's: when another is asked, it begins anew.
void Hub::set_initial(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame, const Blob& payload,
                      std::function<void()> done) {
  std::shared_ptr<Model> model;
  {
    const Lock lock(mutex_);
    if (!model_ || !initialiser_ || *initialiser_ != slot)
      throw Error(ErrorKind::frame, "bad frame: nobody asked for first weights", "kind");
    if (frame.part >= model_->weight_parts())
      throw Error(ErrorKind::frame, "bad frame: this part is not of weights", "part");
    model = model_;
  }
  post(frame.part, [this, model, session, slot, frame, payload, done = std::move(done)] {
    const auto asked = [&] { return model == model_ && initialiser_ && *initialiser_ == slot; };
    {
      const Lock lock(mutex_);
      if (!asked()) return done();
    }
    Part& part = *model->desks[frame.part].part;
    try {
      part.set(*payload);
    } catch (const Error& error) {
      count_refusal("corrupt");
      session->refuse(Refusal::malformed, error.what());
      return done();
    }
    Lock lock(mutex_);
    if (asked()) {
      model->ready[frame.part] = 1;
      if (model->whole()) all_ready();
    }
    lock.unlock();
    done();
  });
}

void Hub::all_ready() {
  initialiser_.reset();
  for (uint32_t slot : std::exchange(waiting_, {}))
    if (members_.at(slot).session) welcome(members_.at(slot), false);
  want_save();  // from here on a server that is killed has something to go on from
}

void Hub::take_buffers(const Blob& payload) {
  const Lock lock(mutex_);
  if (!model_) return;
  std::vector<std::vector<float>> values;
  std::vector<void*> out;
  for (const TensorSpec& spec : model_->buffer_plan.tensors()) out.push_back(values.emplace_back(spec.count).data());
  model_->buffer_runner->decode(*payload, out);  // Error{frame} if it is not what the signature says
  model_->buffers = payload;
}

void Hub::take_report(Member& member, const nlohmann::json& text) {
  if (const auto found = text.find("loss"); found != text.end() && found->is_number())
    member.loss = found->get<double>();
  if (const auto found = text.find("step"); found != text.end() && found->is_number_unsigned())
    member.step = found->get<uint64_t>();
}

// Everything it had to hand over came before it on the same connection.
void Hub::goodbye(Member& member) {
  member.left = true;
  if (options_.checkpoint.empty() || !model_->whole())
    member.session->send({.kind = Kind::notice}, text_blob({{"left", true}}));
  else
    want_save();
  say("left", {{"worker", member.id.substr(0, 8)}, {"name", member.name}});
}

void Hub::end_session(Member& member) {
  slots_.erase(member.session.get());
  member.bytes_up += member.session->bytes_in();
  member.bytes_down += member.session->bytes_out();
  member.session = nullptr;
  member.away = Clock::now();
}

// Of those who went away for good, so that a server does not grow with all who were ever there.
void Hub::forget_oldest() {
  const auto oldest = std::find_if(members_.begin(), members_.end(), [](const auto& one) {
    return !one.second.session && (one.second.left || one.second.lost);
  });
  if (oldest == members_.end()) return;
  const std::shared_ptr<Model> model = model_;
  for (uint32_t p = 0; p < model->cuts.size(); ++p)
    post(p, [this, model, p, slot = oldest->first] {
      model->desks[p].part->forget(slot);
      note_part(model, p);
    });
  members_.erase(oldest);
}

void Hub::vanished(const Session* session) {
  Lock lock(mutex_);
  Member* member = member_of(session);
  if (!member) return;
  end_session(*member);
  if (initialiser_ && *initialiser_ == member->slot) {
    initialiser_.reset();
    std::erase_if(waiting_, [&](uint32_t slot) { return !members_.at(slot).session; });
    if (waiting_.empty()) {
      model_ = nullptr;  // nobody knows its weights: the next worker may train something else
      members_.clear();
      return;
    }
    std::fill_n(model_->ready.begin(), model_->weight_parts(), 0);
    initialiser_ = waiting_.front();
    waiting_.erase(waiting_.begin());
    welcome(members_.at(*initialiser_), true);
  }
  const bool left = member->left;
  const nlohmann::json event = {{"worker", member->id.substr(0, 8)},
                                {"name", member->name},
                                {"present", present()},
                                {"after_s", static_cast<uint64_t>(seconds_since(member->joined))}};
  if (members_.size() > kMaxGone) forget_oldest();
  lock.unlock();
  if (!left) say("vanished", event);
  recheck();
}

void Hub::tick() {
  Lock lock(mutex_);
  while (!stopping_) {
    tick_wake_.wait_for(lock, std::chrono::milliseconds(50));
    bool changed = false;
    for (auto& [slot, member] : members_) {
      if (member.session || member.left || member.lost) continue;
      if (member.awaited && seconds_since(member.away) > options_.return_s) {
        member.awaited = false;
        changed = true;
      }
      if (seconds_since(member.away) > options_.rejoin_s) {
        changed = changed || member.awaited;
        member.awaited = false;
        member.lost = true;
        say("lost", {{"worker", member.id.substr(0, 8)}, {"name", member.name}});
      }
    }
    if (!model_) continue;
    const std::shared_ptr<Model> model = model_;
    std::vector<uint32_t> open;
    for (uint32_t p = 0; p < model->cuts.size(); ++p) {
      if (model->open[p] || changed) open.push_back(p);
      if (!copy_ && !to_write_ && !save_retry_ && disk_holds_us_up(*model, p)) want_save();
    }
    lock.unlock();
    for (uint32_t p : open)
      post(p, [this, model, p, changed] {
        Desk& desk = model->desks[p];
        const bool overdue = !desk.waiters.empty() && seconds_since(desk.since) > options_.deadline_s;
        if (overdue || changed) try_close(model, p, overdue);
        if (options_.async) answer_due(model, p);
      });
    lock.lock();
  }
}

void Hub::recheck() {
  std::shared_ptr<Model> model;
  {
    const Lock lock(mutex_);
    model = model_;
  }
  if (!model) return;
  for (uint32_t p = 0; p < model->cuts.size(); ++p)
    post(p, [this, model, p] {
      try_close(model, p, false);
      if (options_.async) answer_due(model, p);
    });
}

bool Hub::finished() const {
  const Lock lock(mutex_);
  if (members_.empty()) return false;
  return std::all_of(members_.begin(), members_.end(),
                     [](const auto& one) { return one.second.left && !one.second.session; });
}

void Hub::stop() {
  std::vector<std::shared_ptr<Session>> sessions;
  {
    Lock lock(mutex_);
    if (stopping_) return;
    draining_ = true;
    if (model_ && model_->whole() && !options_.checkpoint.empty()) {
      // One more copy, of everything that was acknowledged; then the writer has the time it needs.
      const uint64_t before = saved_ + save_failed_ + (copy_ || to_write_ ? 1 : 0);
      want_save();
      save_wake_.wait_for(lock, std::chrono::seconds(60),
                          [&] { return saved_ + save_failed_ > before && !copy_ && !to_write_ && !save_again_; });
    }
    stopping_ = true;
    for (const auto& [slot, member] : members_)
      if (member.session) sessions.push_back(member.session);
  }
  for (const auto& session : sessions) session->refuse(Refusal::stopping, "the server is stopping");
  say("stopped", {});
}

}  // namespace gradwire::server
