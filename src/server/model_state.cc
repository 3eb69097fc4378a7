// SPDX-License-Identifier: Apache-2.0
// The keys of `extra` and the names of the arrays are the format of the checkpoint: they stay as they are.
#include "server/model_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string_view>
#include <unordered_map>

#include "gradwire/error.h"

namespace gradwire::server {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxVersion = uint64_t{1} << 62;  // no run comes near it, and steps can be added to it

std::string pool_name(size_t shard) { return fmt::format("gradwire.pool.{}", shard); }
std::string residual_name(size_t shard) { return fmt::format("gradwire.owed.{}", shard); }

std::string momentum_name(size_t shard) { return fmt::format("gradwire.momentum.{}", shard); }

// A list of arrays by their names. A model may have 100,000 of them, so none is searched for from the beginning.
class ArrayIndex {
 public:
  explicit ArrayIndex(const std::vector<StoredArray>& list) {
    for (const StoredArray& one : list) by_name_.emplace(one.name, &one);
  }
  const StoredArray& find(const std::string& name) const {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) throw Error(ErrorKind::frame, fmt::format("bad state: there is no '{}'", name), name);
    return *found->second;
  }

 private:
  std::unordered_map<std::string_view, const StoredArray*> by_name_;
};

StoredArray flat_array(std::string name, const std::vector<float>& values) {
  return {std::move(name), {static_cast<int64_t>(values.size())}, values};
}

// What codecs have learned is small, and a multiple of 8 bytes: the state text has it as numbers.
json words_of(const std::vector<std::byte>& bytes) {
  std::vector<uint64_t> words(bytes.size() / sizeof(uint64_t));
  std::copy_n(bytes.begin(), words.size() * sizeof(uint64_t), std::as_writable_bytes(std::span(words)).begin());
  return words;
}

std::vector<std::byte> bytes_of_words(const json& part, const char* key) {
  const auto found = part.find(key);
  if (found == part.end()) return {};  // of a codec that learns nothing, or of an earlier version
  const auto words = found->get<std::vector<uint64_t>>();
  const auto bytes = std::as_bytes(std::span(words));
  return {bytes.begin(), bytes.end()};
}

WorkerRow row_of(const WorkerRecord& worker, const ModelCopy& copy) {
  // A worker that left since this copy was begun has sent more than the copy has: it did not leave yet.
  WorkerRow row{worker.id, worker.name, worker.left && copy.left.contains(worker.slot), {}, {}, {}, {}};
  json squares = json::array();
  for (const ShardSnapshot& shard : copy.shards) {
    const auto found = shard.progress.find(worker.slot);
    const WorkerProgress own = found == shard.progress.end() ? WorkerProgress{} : found->second;
    row.sequence.push_back(own.sequence);
    row.computed.push_back(own.tally.computed);
    row.residual.push_back(own.tally.residual);
    squares.push_back(own.tally.squares);
  }
  row.extra = {{"slot", worker.slot},
               {"lost", worker.lost},
               {"updates", worker.updates},
               {"late", worker.late},
               {"squares", squares}};
  return row;
}

// The workers of the checkpoint; what was applied of them goes into the snapshots of the shards.
void restore_workers(const ServerState& state, bool async, uint32_t next_slot, ServerModel& model,
                     std::vector<ShardSnapshot>& shards, Membership& membership) {
  for (const WorkerRow& row : state.workers) {
    WorkerRecord worker;
    worker.id = row.id;
    worker.name = row.name;
    worker.slot = row.extra.at("slot").get<uint32_t>();
    worker.left = row.left;
    worker.lost = row.extra.at("lost").get<bool>();
    worker.awaited = !worker.left && !worker.lost && !async;
    worker.updates = row.extra.at("updates").get<uint64_t>();
    worker.late = row.extra.at("late").get<uint64_t>();
    worker.straggler.resize(shards.size());
    worker.clock.resize(shards.size());
    worker.joined = worker.last_update = worker.away = SteadyClock::now();
    if (row.sequence.size() != shards.size() || worker.slot >= uint32_t{1} << 31)
      throw Error(ErrorKind::frame, "bad state: a worker's row does not fit", "workers");
    // The next worker would get the number of this one, and with it what was applied of it.
    if (worker.slot >= next_slot)
      throw Error(ErrorKind::frame,
                  fmt::format("bad state: next_slot is {}; a worker has {} already", next_slot, worker.slot),
                  "next_slot");
    if (membership.find(worker.slot))
      throw Error(ErrorKind::frame, fmt::format("bad state: two workers have the slot {}", worker.slot), "slot");
    for (size_t p = 0; p < shards.size(); ++p) {
      if (row.sequence[p] == 0) continue;
      const Tally tally{row.computed[p], row.extra.at("squares").at(p).get<double>(), row.residual[p]};
      shards[p].progress[worker.slot] = {row.sequence[p], tally};
      if (model.layouts[p].role == ShardRole::weights) model.tallies[p][worker.slot] = tally;
    }
    membership.restore(std::move(worker));
  }
}

void restore_shards(const ServerState& state, ServerModel& model, std::vector<ShardSnapshot>& shards) {
  const ArrayIndex weights(state.weights), others(state.others);
  std::vector<std::span<const float>> values;
  for (const Variable& one : model.signature.parameters) {
    values.push_back(weights.find(one.name).values);
    if (values.back().size() != one.count())
      throw Error(ErrorKind::frame, fmt::format("bad state: '{}' has another size than its signature says", one.name),
                  one.name);
  }
  const json& parts = state.extra.at("parts");
  for (size_t p = 0; p < shards.size(); ++p) {
    ShardSnapshot& shard = shards[p];
    const ShardLayout& layout = model.layouts[p];
    shard.version = parts.at(p).at("version").get<uint64_t>();
    if (shard.version > kMaxVersion)
      throw Error(ErrorKind::frame,
                  fmt::format("bad state: parts[{}].version is {}; allowed are 0 to 2^62", p, shard.version),
                  "version");
    shard.applied = parts.at(p).at("applied").get<double>();
    shard.skipped = parts.at(p).value("skipped", uint64_t{0});  // an earlier version did not count them
    if (shard.skipped > kMaxVersion)
      throw Error(ErrorKind::frame,
                  fmt::format("bad state: parts[{}].skipped is {}; allowed are 0 to 2^62", p, shard.skipped),
                  "skipped");
    shard.learned_up = bytes_of_words(parts.at(p), "learned_up");
    shard.learned_down = bytes_of_words(parts.at(p), "learned_down");
    const json& forgotten = state.extra.at("forgotten").at(p);
    const Tally tally = {forgotten.at(0).get<double>(), forgotten.at(1).get<double>(), forgotten.at(2).get<double>()};
    shard.progress[kForgotten].tally = tally;
    if (layout.role == ShardRole::weights) {
      model.tallies[p][kForgotten] = tally;
      shard.weights = layout.gather(values);
      if (model.signature.sends_updates) shard.residual = others.find(residual_name(p)).values;
      if (model.signature.sgd) shard.momentum = others.find(momentum_name(p)).values;
    } else {
      shard.weights = others.find(pool_name(p)).values;
    }
    model.versions[p] = model.durable[p] = shard.version;
    model.applied[p] = shard.applied;
    model.skipped[p] = shard.skipped;
    model.queues[p].shard->restore(std::move(shard));
    model.ready[p] = 1;
    model.bytes[p] = model.queues[p].shard->bytes();
  }
}

void restore_buffers(const ServerState& state, ServerModel& model) {
  if (state.buffers.empty()) return;
  std::vector<std::byte> message(model.buffer_plan.message_bytes());
  std::vector<const void*> in;
  const ArrayIndex buffers(state.buffers);
  for (const Variable& one : model.signature.buffers) {
    const StoredArray& array = buffers.find(one.name);
    if (array.values.size() != one.count())
      throw Error(ErrorKind::frame, fmt::format("bad state: buffer '{}' has another size", one.name), one.name);
    in.push_back(array.values.data());
  }
  model.buffer_runner->encode(in, {}, message);
  model.buffers = make_blob(std::move(message));
}

}  // namespace

ServerState copied_arrays(const ServerModel& model, const ModelCopy& copy) {
  ServerState state;
  state.step = kNone;
  for (size_t p = 0; p < model.weight_shards(); ++p) state.step = std::min(state.step, copy.shards[p].version);
  state.signature = model.signature.json();
  json parts = json::array();
  std::vector<std::vector<float>> values;
  for (const Variable& one : model.signature.parameters) values.emplace_back(one.count());
  for (size_t p = 0; p < model.layouts.size(); ++p) {
    const ShardSnapshot& shard = copy.shards[p];
    parts.push_back({{"version", shard.version}, {"applied", shard.applied}});
    if (shard.skipped > 0) parts.back()["skipped"] = shard.skipped;
    if (!shard.learned_up.empty()) parts.back()["learned_up"] = words_of(shard.learned_up);
    if (!shard.learned_down.empty()) parts.back()["learned_down"] = words_of(shard.learned_down);
    if (model.layouts[p].role == ShardRole::pool) {
      state.others.push_back(flat_array(pool_name(p), shard.weights));
      continue;
    }
    // Weights are stored by parameter, so that other programs can read them.
    auto from = shard.weights.begin();
    for (const ParameterRange& range : model.layouts[p].ranges) {
      std::copy_n(from, range.count, values[range.parameter].begin() + static_cast<std::ptrdiff_t>(range.first));
      from += static_cast<std::ptrdiff_t>(range.count);
    }
    if (!shard.residual.empty()) state.others.push_back(flat_array(residual_name(p), shard.residual));
    if (!shard.momentum.empty()) state.others.push_back(flat_array(momentum_name(p), shard.momentum));
  }
  for (size_t i = 0; i < values.size(); ++i)
    state.weights.push_back(
        {model.signature.parameters[i].name, model.signature.parameters[i].shape, std::move(values[i])});
  state.extra["parts"] = std::move(parts);
  return state;
}

void add_bookkeeping(ServerState& state, const ServerModel& model, const ModelCopy& copy, const HubOptions& options,
                     const Membership& membership) {
  if (model.buffers) {
    std::vector<void*> out;
    for (const Variable& one : model.signature.buffers)
      state.buffers.push_back({one.name, one.shape, std::vector<float>(one.count())});
    for (StoredArray& one : state.buffers) out.push_back(one.values.data());
    model.buffer_runner->decode(*model.buffers, out);
  }
  for (const auto& [slot, worker] : membership.all()) state.workers.push_back(row_of(worker, copy));
  // Workers that the server has forgotten still belong in the ledger: their tallies are kept as one sum.
  json forgotten = json::array();
  for (const ShardSnapshot& shard : copy.shards) {
    Tally sum;
    for (const auto& [slot, progress] : shard.progress)
      if (!membership.all().contains(slot)) sum += progress.tally;
    forgotten.push_back({sum.computed, sum.squares, sum.residual});
  }
  state.extra["part_elements"] = options.shard_elements;
  state.extra["async"] = options.async;
  state.extra["next_slot"] = membership.next_slot();
  state.extra["forgotten"] = std::move(forgotten);
}

std::shared_ptr<ServerModel> restore_model(const ServerState& state, HubOptions& options, Membership& membership) {
  try {
    const Signature signature = Signature::parse(state.signature);
    try {
      check_limits(signature, options.limits);
    } catch (const Error& error) {
      throw Error(ErrorKind::usage, fmt::format("{}: signature: {} (--max-elements)", options.checkpoint, error.what()),
                  "signature");
    }
    options.shard_elements = state.extra.at("part_elements").get<uint64_t>();
    if (options.shard_elements == 0)
      throw Error(ErrorKind::frame, fmt::format("{}: bad state: part_elements is 0", options.checkpoint),
                  "part_elements");
    if (state.extra.at("async").get<bool>() != options.async)
      throw Error(ErrorKind::usage,
                  fmt::format("{} was saved in mode {}; this server is told otherwise", options.checkpoint,
                              options.async ? "sync" : "async"),
                  "mode");
    auto model = std::make_shared<ServerModel>(signature, options.shard_elements, options.async);
    std::vector<ShardSnapshot> shards(model->layouts.size());
    const auto next_slot = state.extra.at("next_slot").get<uint64_t>();
    if (next_slot > uint64_t{1} << 31)
      throw Error(ErrorKind::frame, fmt::format("bad state: next_slot is {}; allowed are 0 to 2^31", next_slot),
                  "next_slot");
    restore_workers(state, options.async, static_cast<uint32_t>(next_slot), *model, shards, membership);
    restore_shards(state, *model, shards);
    restore_buffers(state, *model);
    membership.set_next_slot(static_cast<uint32_t>(next_slot));
    return model;
  } catch (const json::exception& error) {
    throw Error(ErrorKind::frame, fmt::format("{}: bad state: {}", options.checkpoint, error.what()), "state");
  }
}

}  // namespace gradwire::server
