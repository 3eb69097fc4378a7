// SPDX-License-Identifier: Apache-2.0
#include "collective/learning.h"

#include <fmt/format.h>

#include <algorithm>

namespace gradwire {

Learning::Learning(const Job& job, Side side, int world) : fixed_(side == Side::up ? job.up : job.down) {
  std::map<std::string, std::vector<size_t>> same;
  for (size_t i = 0; i < fixed_.size(); ++i)
    if (fixed_[i].traits().learns) same[fixed_[i].str()].push_back(i);
  for (auto& [spec, tensors] : same) {
    uint64_t elements = 0;
    for (size_t i : tensors) elements += job.tensors[i].count;
    const Codec codec = fixed_[tensors[0]];
    // Down, every element has one sender.
    Learner learner(codec, elements, side == Side::up ? world : 1);
    learners_.push_back(
        {fmt::format("{}:{}", side == Side::up ? "up" : "down", spec), std::move(tensors), std::move(learner)});
  }
}

std::vector<Codec> Learning::codecs(uint64_t step, double rate) const {
  std::vector<Codec> all = fixed_;
  for (const Entry& entry : learners_) {
    const Codec codec = entry.learner.codec(step, rate);
    for (size_t i : entry.tensors) all[i] = codec;
  }
  return all;
}

bool Learning::looks(uint64_t step) const {
  return std::any_of(learners_.begin(), learners_.end(), [&](const Entry& entry) { return entry.learner.observes(step); });
}
bool Learning::ahead() const {
  return std::any_of(learners_.begin(), learners_.end(), [](const Entry& entry) { return entry.learner.ahead(); });
}

void Learning::look(Runner& runner, std::span<const Shard> shards, uint64_t step, std::span<const void* const> tensors,
                    const Residuals* residuals, std::span<const std::byte> message, bool ahead) {
  for (Entry& entry : learners_) {
    if (!entry.due(step, ahead)) continue;
    std::vector<uint32_t> which;
    for (uint32_t s = 0; s < shards.size(); ++s)
      if (std::find(entry.tensors.begin(), entry.tensors.end(), shards[s].tensor) != entry.tensors.end())
        which.push_back(s);
    if (which.empty()) continue;
    entry.learner.observe(runner, which, step, tensors, residuals, message);
    runner.wait();
    entry.learner.collect();
  }
}

size_t Learning::evidence_bytes(uint64_t step, bool ahead) const {
  size_t bytes = 0;
  for (const Entry& entry : learners_)
    if (entry.due(step, ahead)) bytes += entry.learner.stats_bytes();
  return bytes;
}

void Learning::take_evidence(uint64_t step, bool ahead, std::span<std::byte> out) {
  for (Entry& entry : learners_) {
    if (!entry.due(step, ahead)) continue;
    entry.learner.take_stats(out.first(entry.learner.stats_bytes()));
    out = out.subspan(entry.learner.stats_bytes());
  }
}

void Learning::learn(uint64_t step, bool ahead, std::span<const std::span<const std::byte>> ranks) {
  size_t at = 0;
  for (Entry& entry : learners_) {
    if (!entry.due(step, ahead)) continue;
    std::vector<std::span<const std::byte>> own;
    for (const auto& one : ranks) own.push_back(one.subspan(at, entry.learner.stats_bytes()));
    entry.learner.learn(step, own);
    at += entry.learner.stats_bytes();
  }
}

void Learning::learn(Engine& engine, uint64_t step, bool ahead, ReduceTimer& clock) {
  const size_t bytes = evidence_bytes(step, ahead);
  if (bytes == 0) return;
  const auto world = static_cast<size_t>(engine.size()), me = static_cast<size_t>(engine.rank());
  std::vector<std::vector<std::byte>> all(world, std::vector<std::byte>(bytes));
  take_evidence(step, ahead, all[me]);
  {
    const auto timer = clock.wait();
    engine.all_gather(all[me], std::vector<Bytes>(all.begin(), all.end())).wait();
  }
  const auto timer = clock.encode();
  learn(step, ahead, std::vector<std::span<const std::byte>>(all.begin(), all.end()));
}

void Learning::release(size_t tensor) {
  fixed_[tensor] = Codec();
  for (Entry& entry : learners_) std::erase(entry.tensors, tensor);
}

void Learning::keep(ErrorFeedback& feedback) const {
  for (const Entry& entry : learners_) feedback.set_note(entry.note, entry.learner.save());
}

void Learning::restore(const ErrorFeedback& feedback) {
  for (Entry& entry : learners_) {
    const auto found = feedback.notes().find(entry.note);
    if (found != feedback.notes().end()) entry.learner.restore(found->second);
  }
}

}  // namespace gradwire
