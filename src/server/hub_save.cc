// SPDX-License-Identifier: Apache-2.0
// The checkpoint. Parts are independent: each is copied by its own strand between two of its steps, with the table of what
// was applied of whom, and the copies together are written by a thread of their own while training goes on. What is on
// disk is then told to the workers, who keep what they sent until it is. A disk that fails is tried again every second; when
// three checkpoints are overdue, steps wait for it, because workers cannot keep more.
#include <fmt/format.h>

#include <algorithm>

#include "gradwire/error.h"
#include "server/hub.h"

namespace gradwire::server {
namespace {

std::string part_name(const char* what, size_t part) { return fmt::format("gradwire.{}.{}", what, part); }

const ServerState::Array& find_array(const std::vector<ServerState::Array>& list, const std::string& name) {
  for (const ServerState::Array& one : list)
    if (one.name == name) return one;
  throw Error(ErrorKind::frame, fmt::format("bad state: there is no '{}'", name), name);
}

}  // namespace

// With the lock held.
void Hub::want_save() {
  if (options_.checkpoint.empty() || !model_ || !model_->whole()) return;
  if (copy_ || to_write_) {
    save_again_ = true;
    return;
  }
  copy_ = std::make_shared<Copy>();
  copy_->parts.resize(model_->cuts.size());
  copy_->missing = model_->cuts.size();
  for (const auto& [slot, member] : members_) {
    if (member.left) copy_->left.insert(slot);
    if (member.left && member.session) copy_->leavers.push_back(member.session);
  }
  const std::shared_ptr<Model> model = model_;
  const std::shared_ptr<Copy> copy = copy_;
  for (uint32_t p = 0; p < model->cuts.size(); ++p)
    post(p, [this, model, copy, p] {
      PartState state = model->desks[p].part->state();
      const Lock lock(mutex_);
      copy->parts[p] = std::move(state);
      if (--copy->missing > 0) return;
      to_write_ = std::exchange(copy_, nullptr);
      save_wake_.notify_all();
    });
}

ServerState Hub::state_of(const Model& model, const Copy& copy) const {
  ServerState state;
  state.step = kNone;
  for (size_t p = 0; p < model.weight_parts(); ++p) state.step = std::min(state.step, copy.parts[p].version);
  state.signature = model.signature.json();
  nlohmann::json parts = nlohmann::json::array();
  std::vector<std::vector<float>> values;
  for (const Variable& one : model.signature.parameters) values.emplace_back(one.count());
  for (size_t p = 0; p < model.cuts.size(); ++p) {
    const PartState& part = copy.parts[p];
    parts.push_back({{"version", part.version}, {"applied", part.applied}});
    if (model.cuts[p].role == Role::pool) {
      state.others.push_back({part_name("pool", p), {static_cast<int64_t>(part.weights.size())}, part.weights});
      continue;
    }
    auto from = part.weights.begin();
    for (const Piece& piece : model.cuts[p].pieces) {
      std::copy_n(from, piece.count, values[piece.parameter].begin() + static_cast<std::ptrdiff_t>(piece.first));
      from += static_cast<std::ptrdiff_t>(piece.count);
    }
    if (!part.owed.empty())
      state.others.push_back({part_name("owed", p), {static_cast<int64_t>(part.owed.size())}, part.owed});
  }
  for (size_t i = 0; i < values.size(); ++i)
    state.weights.push_back(
        {model.signature.parameters[i].name, model.signature.parameters[i].shape, std::move(values[i])});

  const Lock lock(mutex_);
  if (model.buffers) {
    std::vector<void*> out;
    for (const Variable& one : model.signature.buffers)
      state.buffers.push_back({one.name, one.shape, std::vector<float>(one.count())});
    for (ServerState::Array& one : state.buffers) out.push_back(one.values.data());
    model.buffer_runner->decode(*model.buffers, out);
  }
  for (const auto& [slot, member] : members_) {
    // Whoever left since has handed over more than this copy has.
    WorkerRow row{member.id, member.name, member.left && copy.left.contains(slot), {}, {}, {}, {}};
    nlohmann::json squares = nlohmann::json::array();
    for (const PartState& part : copy.parts) {
      const auto found = part.rows.find(slot);
      const Row own = found == part.rows.end() ? Row{} : found->second;
      row.sequence.push_back(own.sequence);
      row.computed.push_back(own.tally.computed);
      row.residual.push_back(own.tally.residual);
      squares.push_back(own.tally.squares);
    }
    row.extra = {{"slot", slot},
                 {"lost", member.lost},
                 {"updates", member.updates},
                 {"late", member.late},
                 {"squares", squares}};
    state.workers.push_back(std::move(row));
  }
  nlohmann::json forgotten = nlohmann::json::array();
  for (const PartState& part : copy.parts) {
    Tally sum;
    for (const auto& [slot, row] : part.rows)
      if (!members_.contains(slot)) sum += row.tally;
    forgotten.push_back({sum.computed, sum.squares, sum.residual});
  }
  nlohmann::json losses = nlohmann::json::array();
  for (const auto& [step, loss] : losses_) losses.push_back({step, loss});
  state.extra = {{"parts", parts},          {"part_elements", options_.part_elements},
                 {"async", options_.async}, {"next_slot", next_slot_},
                 {"bytes_up", bytes_up_},   {"bytes_down", bytes_down_},
                 {"losses", losses},        {"forgotten", forgotten}};
  return state;
}

void Hub::save_loop() {
  Lock lock(mutex_);
  while (true) {
    save_wake_.wait(lock, [this] { return save_stop_ || to_write_; });
    if (!to_write_) return;
    const std::shared_ptr<Model> model = model_;
    const std::shared_ptr<Copy> copy = to_write_;
    lock.unlock();
    std::string error;
    uint64_t bytes = 0;
    try {
      const ServerState state = state_of(*model, *copy);
      save_state(options_.checkpoint, state, options_.save_hook);
      for (const ServerState::Array& one : state.weights) bytes += 4 * one.values.size();
    } catch (const std::exception& failure) {
      error = failure.what();
    }
    lock.lock();
    if (error.empty()) {
      ++saved_;
      save_bytes_ = bytes;
      save_time_ = Clock::now();
      for (size_t p = 0; p < copy->parts.size(); ++p) model->durable[p] = copy->parts[p].version;
      tell_durable(*model);
      for (const std::weak_ptr<Session>& one : copy->leavers)
        if (const auto session = one.lock()) session->send({.kind = Kind::notice}, text_blob({{"left", true}}));
      if (!save_error_.empty()) say("saving again", {{"path", options_.checkpoint}});
      save_error_.clear();
    } else {
      ++save_failed_;
      if (error != save_error_) say("cannot save", {{"path", options_.checkpoint}, {"error", error}});
      save_error_ = error;
    }
    to_write_ = nullptr;
    if (!error.empty() && !save_stop_ && !draining_) {
      save_retry_ = true;
      save_wake_.wait_for(lock, std::chrono::seconds(1), [this] { return save_stop_ || draining_; });
      save_retry_ = false;
      save_again_ = true;
    }
    if (std::exchange(save_again_, false) && !save_stop_) want_save();
    save_wake_.notify_all();
    const bool held_up = !error.empty();
    lock.unlock();
    if (!held_up) recheck();  // steps may have waited for it
    lock.lock();
    if (save_stop_ && !to_write_) return;
  }
}

void Hub::tell_durable(const Model& model) {
  const Blob text = text_blob({{"durable", model.durable}});
  for (const auto& [slot, member] : members_)
    if (member.session) member.session->send({.kind = Kind::durable}, text);
}

void Hub::load() {
  if (options_.checkpoint.empty()) return;
  std::string note;
  std::optional<ServerState> found = load_newest(options_.checkpoint, &note);
  if (!note.empty()) say("checkpoint", {{"note", note}});
  if (!found) return;
  try {
    const Signature signature = Signature::parse(found->signature);
    options_.part_elements = found->extra.at("part_elements").get<uint64_t>();
    if (found->extra.at("async").get<bool>() != options_.async)
      throw Error(ErrorKind::usage,
                  fmt::format("{} was saved in mode {}; this server is told otherwise", options_.checkpoint,
                              options_.async ? "sync" : "async"),
                  "mode");
    auto model = std::make_shared<Model>(signature, options_.part_elements);
    const nlohmann::json& parts = found->extra.at("parts");
    std::vector<PartState> states(model->cuts.size());
    for (const WorkerRow& row : found->workers) {
      Member member;
      member.id = row.id;
      member.name = row.name;
      member.slot = row.extra.at("slot").get<uint32_t>();
      member.left = row.left;
      member.lost = row.extra.at("lost").get<bool>();
      member.awaited = !member.left && !member.lost && !options_.async;
      member.updates = row.extra.at("updates").get<uint64_t>();
      member.late = row.extra.at("late").get<uint64_t>();
      member.lags.resize(model->cuts.size());
      member.clock.resize(model->cuts.size());
      member.joined = member.last_update = member.away = Clock::now();
      if (row.sequence.size() != states.size() || member.slot >= uint32_t{1} << 31)
        throw Error(ErrorKind::frame, "bad state: a worker's row does not fit", "workers");
      for (size_t p = 0; p < states.size(); ++p) {
        if (row.sequence[p] == 0) continue;
        const Tally tally{row.computed[p], row.extra.at("squares").at(p).get<double>(), row.residual[p]};
        states[p].rows[member.slot] = {row.sequence[p], tally};
        if (model->cuts[p].role == Role::weights) model->tallies[p][member.slot] = tally;
      }
      members_[member.slot] = member;
    }
    std::vector<std::span<const float>> values;
    for (const Variable& one : signature.parameters) {
      values.push_back(find_array(found->weights, one.name).values);
      if (values.back().size() != one.count())
        throw Error(ErrorKind::frame, fmt::format("bad state: '{}' has another size than its signature says", one.name),
                    one.name);
    }
    for (size_t p = 0; p < states.size(); ++p) {
      PartState& state = states[p];
      state.version = parts.at(p).at("version").get<uint64_t>();
      state.applied = parts.at(p).at("applied").get<double>();
      const nlohmann::json& forgotten = found->extra.at("forgotten").at(p);
      state.rows[kForgotten].tally = {forgotten.at(0).get<double>(), forgotten.at(1).get<double>(),
                                      forgotten.at(2).get<double>()};
      if (model->cuts[p].role == Role::weights) model->tallies[p][kForgotten] = state.rows[kForgotten].tally;
      if (model->cuts[p].role == Role::pool) {
        state.weights = find_array(found->others, part_name("pool", p)).values;
      } else {
        state.weights = model->cuts[p].gather(values);
        if (signature.sends_updates) state.owed = find_array(found->others, part_name("owed", p)).values;
      }
      model->versions[p] = model->durable[p] = state.version;
      model->applied[p] = state.applied;
      model->desks[p].part->restore(std::move(state));
      model->ready[p] = 1;
      model->bytes[p] = model->desks[p].part->bytes();
    }
    if (!found->buffers.empty()) {
      std::vector<std::byte> message(model->buffer_plan.message_bytes());
      std::vector<const void*> in;
      for (const Variable& one : signature.buffers) {
        in.push_back(find_array(found->buffers, one.name).values.data());
        if (find_array(found->buffers, one.name).values.size() != one.count())
          throw Error(ErrorKind::frame, fmt::format("bad state: buffer '{}' has another size", one.name), one.name);
      }
      model->buffer_runner->encode(in, {}, message);
      model->buffers = make_blob(std::move(message));
    }
    next_slot_ = found->extra.at("next_slot").get<uint32_t>();
    bytes_up_ = found->extra.at("bytes_up").get<uint64_t>();
    bytes_down_ = found->extra.at("bytes_down").get<uint64_t>();
    for (const nlohmann::json& one : found->extra.at("losses"))
      losses_.emplace_back(one.at(0).get<uint64_t>(), one.at(1).get<double>());
    model_ = std::move(model);
    step_ = model_->step();
    say("restored", {{"step", found->step}, {"workers", members_.size()}});
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorKind::frame, fmt::format("{}: bad state: {}", options_.checkpoint, error.what()), "state");
  }
}

}  // namespace gradwire::server
