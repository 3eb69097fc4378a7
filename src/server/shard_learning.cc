// SPDX-License-Identifier: Apache-2.0
// Statistics, little-endian: for each codec that has some, in rising order, its number (u64) and the statistics of its
// Learner. A state: for each codec the bytes of its Learner's state (u64) and the state.
#include "server/shard_learning.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "gradwire/error.h"

namespace gradwire::server {
namespace {

// How far back a worker looks for steps at which statistics were due. One that was away for longer waits for the next.
constexpr uint64_t kMostLookedBack = 4096;

[[noreturn]] void malformed(const char* field, const std::string& words) {
  throw Error(ErrorKind::frame, fmt::format("bad {}: {}", field, words), field);
}

void check_codec(const Learner& learner, Direction direction) {
  const Codec& codec = learner.base();
  const char* field = direction == Direction::up ? "up" : "down";
  if (learner.ahead())
    throw Error(ErrorKind::usage,
                fmt::format("{} is {}, which wants the statistics of all workers before a step is sent; a server gets "
                            "them with the step",
                            field, codec.str()),
                field);
  if (direction == Direction::down && codec.has("schedule") && codec.get("schedule") == "rate")
    throw Error(ErrorKind::usage,
                fmt::format("{} is {}, which follows the learning rate; a server does not know it", field, codec.str()),
                field);
}

uint64_t word_at(std::span<const std::byte> bytes) {
  uint64_t word;
  std::memcpy(&word, bytes.data(), sizeof word);
  return word;
}

void append(std::vector<std::byte>& to, uint64_t word) {
  const auto bytes = std::as_bytes(std::span(&word, 1));
  to.insert(to.end(), bytes.begin(), bytes.end());
}

}  // namespace

ShardRun run_of(const Signature& signature, const ShardLayout& layout, bool async) {
  const auto all = static_cast<double>(std::max<uint64_t>(1, signature.elements()));
  return {.steps = async ? 0 : signature.steps, .share = static_cast<double>(layout.elements()) / all};
}

ShardLearning::ShardLearning(const std::vector<TensorSpec>& specs, Direction direction, const ShardRun& run)
    : specs_(specs), run_(run) {
  std::map<std::string, std::vector<uint32_t>> same;
  for (uint32_t i = 0; i < specs.size(); ++i)
    if (specs[i].codec.traits().learns) same[specs[i].codec.str()].push_back(i);
  for (auto& [spec, tensors] : same) {
    uint64_t elements = 0;
    for (uint32_t i : tensors) elements += specs[i].count;
    Learner learner(specs[tensors[0]].codec, elements, 1, run.steps, run.share);
    check_codec(learner, direction);
    entries_.push_back({std::move(tensors), elements, 1, std::move(learner)});
  }
}

std::vector<TensorSpec> ShardLearning::specs(uint64_t step, double rate) const {
  std::vector<TensorSpec> all = specs_;
  for (const CodecEntry& entry : entries_) {
    const Codec codec = entry.learner.codec(step, rate);
    for (uint32_t i : entry.tensors) all[i].codec = codec;
  }
  return all;
}

bool ShardLearning::CodecEntry::due(uint64_t first, uint64_t last) const {
  for (uint64_t step = last;; --step) {
    if (learner.observes(step)) return true;
    if (step <= first || last - step >= kMostLookedBack) return false;
  }
}

bool ShardLearning::due(uint64_t first, uint64_t last) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const CodecEntry& entry) { return entry.due(first, last); });
}

std::vector<std::byte> ShardLearning::observe(Runner& runner, uint64_t first, uint64_t last,
                                              std::span<const void* const> tensors, const Residuals* residuals,
                                              std::span<const std::byte> message) {
  std::vector<std::byte> all;
  for (size_t i = 0; i < entries_.size(); ++i) {
    CodecEntry& entry = entries_[i];
    if (!entry.due(first, last)) continue;
    entry.learner.observe(runner, entry.tensors, last, tensors, residuals, message);
    runner.wait();
    entry.learner.collect();
    append(all, i);
    all.resize(all.size() + entry.learner.stats_bytes());
    entry.learner.take_stats(std::span(all).last(entry.learner.stats_bytes()));
  }
  return all;
}

std::vector<std::span<const std::byte>> ShardLearning::split(std::span<const std::byte> statistics) const {
  std::vector<std::span<const std::byte>> parts(entries_.size());
  uint64_t next = 0;  // the least number that may follow
  while (!statistics.empty()) {
    if (statistics.size() < sizeof(uint64_t)) malformed("statistics", "they end within a number");
    const uint64_t number = word_at(statistics);
    statistics = statistics.subspan(sizeof(uint64_t));
    if (number < next || number >= entries_.size())
      malformed("statistics", fmt::format("a codec has the number {}; expected is {} to {}", number, next,
                                          static_cast<int64_t>(entries_.size()) - 1));
    const size_t bytes = entries_[number].learner.stats_bytes();
    if (statistics.size() < bytes)
      malformed("statistics", fmt::format("codec {} has {} bytes; expected are {}", number, statistics.size(), bytes));
    parts[number] = statistics.first(bytes);
    statistics = statistics.subspan(bytes);
    next = number + 1;
  }
  return parts;
}

void ShardLearning::check(std::span<const std::byte> statistics, uint64_t step, bool exact) const {
  const std::vector<std::span<const std::byte>> parts = split(statistics);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (exact && entries_[i].due(step, step) == parts[i].empty())
      malformed("statistics", fmt::format("those of codec {} are {} at step {}", i,
                                          parts[i].empty() ? "missing" : "not wanted", step));
    if (!parts[i].empty()) entries_[i].learner.check_stats(parts[i]);
  }
}

void ShardLearning::learn(uint64_t step, std::span<const std::span<const std::byte>> senders) {
  std::vector<std::vector<std::span<const std::byte>>> own(entries_.size());
  for (const auto& one : senders) {
    const std::vector<std::span<const std::byte>> parts = split(one);
    for (size_t i = 0; i < parts.size(); ++i)
      if (!parts[i].empty() && own[i].size() < Learner::kMostPooled) own[i].push_back(parts[i]);
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (own[i].empty()) continue;
    CodecEntry& entry = entries_[i];
    try {
      // Some codecs divide by the number of senders, which changes when workers come and go.
      if (const int count = static_cast<int>(own[i].size()); count != entry.senders) {
        Learner other(entry.learner.base(), entry.elements, count, run_.steps, run_.share);
        other.restore(entry.learner.save());
        entry.learner = std::move(other);
        entry.senders = count;
      }
      entry.learner.learn(step, own[i]);
    } catch (const Error&) {
      // Statistics of one who lies can be such that no table follows from them. The others train on with the old one.
    }
  }
}

std::vector<std::byte> ShardLearning::save() const {
  std::vector<std::byte> all;
  for (const CodecEntry& entry : entries_) {
    const std::vector<std::byte> state = entry.learner.save();
    append(all, state.size());
    all.insert(all.end(), state.begin(), state.end());
  }
  return all;
}

void ShardLearning::restore(std::span<const std::byte> state) {
  for (CodecEntry& entry : entries_) {
    if (state.size() < sizeof(uint64_t)) malformed("learned", "a codec is missing");
    const uint64_t bytes = word_at(state);
    state = state.subspan(sizeof(uint64_t));
    if (bytes > state.size()) malformed("learned", fmt::format("a codec has {} bytes of {}", state.size(), bytes));
    entry.learner.restore(state.first(bytes));
    state = state.subspan(bytes);
  }
  if (!state.empty()) malformed("learned", fmt::format("{} bytes are left over", state.size()));
}

}  // namespace gradwire::server
