// SPDX-License-Identifier: Apache-2.0
#include "collective/learning.h"

#include <fmt/format.h>

#include <algorithm>

namespace gradwire {

Learning::Learning(const Job& job, Direction direction, int world)
    : fixed_(direction == Direction::up ? job.up : job.down) {
  std::map<std::string, std::vector<size_t>> same;
  for (size_t i = 0; i < fixed_.size(); ++i)
    if (fixed_[i].traits().learns) same[fixed_[i].str()].push_back(i);
  for (auto& [spec, tensors] : same) {
    const uint64_t elements = job.elements_with(spec, direction);
    const Codec codec = fixed_[tensors[0]];
    // On the way down every element has one sender.
    Learner learner(codec, elements, direction == Direction::up ? world : 1, job.options.steps);
    learners_.push_back({fmt::format("{}:{}", direction == Direction::up ? "up" : "down", spec), std::move(tensors),
                         std::move(learner)});
  }
}

std::vector<Codec> Learning::codecs(uint64_t step, double rate) const {
  std::vector<Codec> all = fixed_;
  for (const LearnerEntry& entry : learners_) {
    const Codec codec = entry.learner.codec(step, rate);
    for (size_t i : entry.tensors) all[i] = codec;
  }
  return all;
}

std::vector<std::string> Learning::plans() const {
  std::vector<std::string> all;
  for (const LearnerEntry& entry : learners_)
    if (const std::string plan = entry.learner.plan(); !plan.empty())
      all.push_back(fmt::format("{}: {}", entry.name, plan));
  return all;
}

bool Learning::ahead() const {
  return std::any_of(learners_.begin(), learners_.end(),
                     [](const LearnerEntry& entry) { return entry.learner.ahead(); });
}

void Learning::observe(const std::shared_ptr<Runner>& runner, std::span<const Shard> shards, uint64_t step,
                       std::span<const void* const> tensors, const Residuals* residuals,
                       std::span<const std::byte> message, bool ahead) {
  LearnerEntry* before = nullptr;
  for (LearnerEntry& entry : learners_) {
    if (!entry.due(step, ahead)) continue;
    std::vector<uint32_t> which;
    for (uint32_t s = 0; s < shards.size(); ++s)
      if (std::find(entry.tensors.begin(), entry.tensors.end(), shards[s].tensor) != entry.tensors.end())
        which.push_back(s);
    if (which.empty()) continue;
    if (before) before->collect();  // a runner answers one learner at a time
    entry.learner.observe(*runner, which, step, tensors, residuals, message);
    entry.asked.push_back(runner);
    before = &entry;
  }
}

void Learning::LearnerEntry::collect() {
  for (const std::shared_ptr<Runner>& runner : asked) runner->wait();
  learner.collect();
  asked.clear();  // whose memory was read
}

void Learning::discard() {
  for (LearnerEntry& entry : learners_) {
    entry.asked.clear();
    entry.learner.discard();
  }
}

size_t Learning::stats_bytes(uint64_t step, bool ahead) const {
  size_t bytes = 0;
  for (const LearnerEntry& entry : learners_)
    if (entry.due(step, ahead)) bytes += entry.learner.stats_bytes();
  return bytes;
}

void Learning::take_stats(uint64_t step, bool ahead, std::span<std::byte> out) {
  for (LearnerEntry& entry : learners_) {
    if (!entry.due(step, ahead)) continue;
    entry.collect();
    entry.learner.take_stats(out.first(entry.learner.stats_bytes()));
    out = out.subspan(entry.learner.stats_bytes());
  }
}

void Learning::exempt(size_t tensor) {
  fixed_[tensor] = Codec();
  for (LearnerEntry& entry : learners_) std::erase(entry.tensors, tensor);
}

void Learning::save(ErrorFeedback& feedback) const {
  for (const LearnerEntry& entry : learners_) feedback.set_extra(entry.name, entry.learner.save());
}

void Learning::restore(const ErrorFeedback& feedback) {
  for (LearnerEntry& entry : learners_) {
    const auto found = feedback.extras().find(entry.name);
    if (found != feedback.extras().end()) entry.learner.restore(found->second);
  }
}

size_t stats_bytes(const Learnings& learnings, uint64_t step, bool ahead) {
  size_t bytes = 0;
  for (const Learning* one : learnings) bytes += one->stats_bytes(step, ahead);
  return bytes;
}

void take_stats(const Learnings& learnings, uint64_t step, bool ahead, std::span<std::byte> out) {
  for (Learning* one : learnings) {
    const size_t bytes = one->stats_bytes(step, ahead);
    one->take_stats(step, ahead, out.first(bytes));
    out = out.subspan(bytes);
  }
}

void learn(const Learnings& learnings, uint64_t step, bool ahead, std::span<const std::byte> all_ranks, int world) {
  std::map<std::string, std::vector<std::span<const std::byte>>> by_name;
  const size_t ranks = static_cast<size_t>(world), bytes = all_ranks.size() / ranks;
  size_t at = 0;
  for (const Learning* one : learnings)
    for (const auto& entry : one->learners_) {
      if (!entry.due(step, ahead)) continue;
      for (size_t rank = 0; rank < ranks; ++rank)
        by_name[entry.name].push_back(all_ranks.subspan(rank * bytes + at, entry.learner.stats_bytes()));
      at += entry.learner.stats_bytes();
    }
  for (Learning* one : learnings)
    for (auto& entry : one->learners_)
      if (entry.due(step, ahead)) entry.learner.learn(step, by_name[entry.name]);
}

}  // namespace gradwire
