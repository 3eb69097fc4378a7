// SPDX-License-Identifier: Apache-2.0
// The course of learning: what is looked at, how evidence travels, what is kept.
#include "gradwire/learn.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "device/memory.h"
#include "device/scheme.h"
#include "gradwire/error.h"
#include "learn/subjects.h"

namespace gradwire {
namespace {

// A sample of 2^18 elements a step: small against a gradient, large against the few numbers that are learned from it.
constexpr uint64_t kSampleBlocks = 256;

// What a unit is for a sample: tiles stand for whole tensors.
uint64_t sample_unit(const Codec& codec) {
  const uint64_t unit = codec.scheme().unit;
  return unit == 0 ? kTile : unit;
}

}  // namespace

struct Learner::State {
  Codec base;
  std::unique_ptr<Subject> subject;
  Evidence evidence;
  uint64_t sample_blocks = kSampleBlocks;

  // Enqueued, not yet looked at.
  std::span<const float> sample;
  std::span<const uint32_t> sides;
  std::vector<Pick> picks;
  std::vector<uint32_t> lengths;      // of units
  std::vector<uint64_t> run_elements;  // of each run of blocks that was picked

  void forget() { evidence = Evidence{Evidence::kNone, std::vector<int64_t>(subject->counts())}; }

  // Units spread evenly over all that there are, another set each step. Runs of blocks: a unit of several blocks, or a block of several units.
  void choose(const Plan& plan, std::span<const uint32_t> which, uint64_t step) {
    picks.clear();
    run_elements.clear();
    const uint64_t run = std::max<uint64_t>(sample_unit(base), kBlock);
    uint64_t runs = 0;
    for (uint32_t tensor : which) runs += div_up(plan.tensors()[tensor].count, run);
    const uint64_t wanted = std::max<uint64_t>(1, sample_blocks / (run / kBlock)), take = std::min(runs, wanted);
    uint64_t passed = 0, taken = 0;
    const uint64_t turn = take ? step % div_up(runs, take) : 0;
    for (uint32_t tensor : which) {
      const uint64_t count = plan.tensors()[tensor].count, here = div_up(count, run);
      while (taken < take) {
        const uint64_t next = std::min(runs - 1, taken * runs / take + turn) - passed;
        if (next >= here) break;
        ++taken;
        const uint64_t first = next * run, elements = std::min(run, count - first);
        run_elements.push_back(elements);
        for (uint64_t block = first / kBlock; block * kBlock < first + elements; ++block) picks.push_back({tensor, block});
      }
      passed += here;
    }
  }

  void look_at_sample() {
    const uint64_t unit = sample_unit(base);
    lengths.clear();
    std::vector<float> values;
    size_t at = 0;
    for (uint64_t elements : run_elements) {
      values.insert(values.end(), sample.begin() + static_cast<ptrdiff_t>(at), sample.begin() + static_cast<ptrdiff_t>(at + elements));
      at += div_up(elements, kBlock) * kBlock;
      for (uint64_t first = 0; first < elements; first += unit) lengths.push_back(static_cast<uint32_t>(std::min(unit, elements - first)));
    }
    subject->look(values, lengths, evidence);
  }
};

Learner::Learner(const Codec& codec, uint64_t elements, int world) : state_(std::make_unique<State>()) {
  state_->base = codec;
  state_->subject = subject_of(codec, elements, world);
  if (!state_->subject) throw Error(ErrorKind::usage, fmt::format("codec is {}, which learns nothing", codec.name()), "codec");
  state_->forget();
}
Learner::~Learner() = default;
Learner::Learner(Learner&&) noexcept = default;
Learner& Learner::operator=(Learner&&) noexcept = default;

const Codec& Learner::base() const { return state_->base; }
Codec Learner::codec(uint64_t step, double rate) const { return state_->subject->codec(step, rate); }
bool Learner::looks(uint64_t step) const { return state_->subject->due(step); }
bool Learner::ahead() const { return state_->subject->ahead(); }

void Learner::look(Runner& runner, std::span<const uint32_t> which, uint64_t step, std::span<const void* const> tensors,
                   const Residuals* residuals, std::span<const std::byte> message) {
  State& s = *state_;
  if (s.subject->source() == Subject::Source::sides) {
    s.lengths.clear();
    for (uint32_t tensor : which) {
      const Scheme& scheme = runner.plan().tensors()[tensor].codec.scheme();
      const uint64_t count = runner.plan().tensors()[tensor].count;
      if (scheme.side)
        for (uint64_t unit = 0; unit < unit_count(scheme, count); ++unit)
          s.lengths.push_back(static_cast<uint32_t>(std::min<uint64_t>(scheme.unit, count - unit * scheme.unit)));
    }
    s.sides = runner.sides(message, which);
    return;
  }
  s.choose(runner.plan(), which, step);
  s.sample = runner.sample(tensors, residuals, s.picks);
}

void Learner::collect() {
  State& s = *state_;
  if (s.subject->source() == Subject::Source::sides)
    s.subject->look_sides(s.sides, s.lengths, s.evidence);
  else
    s.look_at_sample();
  s.sides = {};
  s.sample = {};
}

size_t Learner::evidence_bytes() const { return (1 + state_->subject->counts()) * sizeof(int64_t); }

void Learner::take_evidence(std::span<std::byte> out) {
  std::memcpy(out.data(), &state_->evidence.exponent, sizeof(int64_t));
  std::memcpy(out.data() + sizeof(int64_t), state_->evidence.counts.data(), state_->evidence.counts.size() * sizeof(int64_t));
  state_->forget();
}

void Learner::learn(uint64_t step, std::span<const std::span<const std::byte>> ranks) {
  // All are brought to the coarsest unit before they are added: the order of the ranks does not matter.
  std::vector<Evidence> all;
  int64_t coarsest = Evidence::kNone;
  for (const auto& bytes : ranks) {
    Evidence one{0, std::vector<int64_t>(state_->subject->counts())};
    std::memcpy(&one.exponent, bytes.data(), sizeof(int64_t));
    std::memcpy(one.counts.data(), bytes.data() + sizeof(int64_t), one.counts.size() * sizeof(int64_t));
    coarsest = std::max(coarsest, one.exponent);
    all.push_back(std::move(one));
  }
  Evidence pooled{coarsest, std::vector<int64_t>(state_->subject->counts())};
  for (const Evidence& one : all) pooled.add(one);
  state_->subject->learn(step, pooled);
}

std::vector<std::byte> Learner::save() const {
  const std::vector<uint64_t> words = state_->subject->save();
  const auto bytes = std::as_bytes(std::span(words));  // there may be none, which memcpy would not take
  return {bytes.begin(), bytes.end()};
}

void Learner::restore(std::span<const std::byte> state) {
  if (state.size() % sizeof(uint64_t) != 0)
    throw Error(ErrorKind::frame, fmt::format("learned state has {} bytes; expected a multiple of 8", state.size()), "learned");
  std::vector<uint64_t> words(state.size() / sizeof(uint64_t));
  std::copy(state.begin(), state.end(), std::as_writable_bytes(std::span(words)).begin());
  state_->subject->restore(words);
}

Codec fit(const Codec& codec, const void* tensor, uint64_t count, DType dtype, const Device& device) {
  if (!codec.traits().learns || count == 0) return codec;
  // Warming up and the pace of refitting are for runs; one tensor is fitted at once, and looked at as a whole if it is not huge.
  Codec eager = codec;
  if (codec.has("refit")) eager = eager.with("refit", "1");
  if (codec.has("start")) eager = eager.with("start", "0");
  if (codec.has("schedule")) eager = eager.with("schedule", "constant");
  if (codec.name() == "dqsgd") eager = eager.with("mode", "paper");
  Learner learner(eager, count, 1);
  learner.state_->sample_blocks = 64 * kSampleBlocks;
  const Plan plan({{"", count, dtype, learner.codec(0)}});
  const auto runner = make_runner(plan, device);
  const void* in[] = {tensor};
  const uint32_t which[] = {0};
  const std::shared_ptr<Memory> memory = memory_of(device);
  const auto release = [memory](std::byte* data) { memory->release(data); };
  const std::unique_ptr<std::byte, decltype(release)> room(static_cast<std::byte*>(memory->allocate(plan.message_bytes())), release);
  const std::span<std::byte> message(room.get(), plan.message_bytes());
  if (learner.ahead()) runner->encode(in, {}, message);
  if (learner.looks(0)) {
    learner.look(*runner, which, 0, in, nullptr, message);
    runner->wait();
    learner.collect();
    std::vector<std::byte> evidence(learner.evidence_bytes());
    learner.take_evidence(evidence);
    const std::span<const std::byte> ranks[] = {evidence};
    learner.learn(0, ranks);
  }
  return codec.fitted(learner.codec(learner.ahead() ? 0 : 1).table());
}

}  // namespace gradwire
