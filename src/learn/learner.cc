// SPDX-License-Identifier: Apache-2.0
// The course of learning: from which elements statistics are taken, how they travel, and what is kept. What a codec
// makes of them is its fitter's (codec/fitter.h).
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "codec/define.h"
#include "codec/fitter.h"
#include "core/bits.h"
#include "device/memory.h"
#include "device/scheme.h"
#include "gradwire/error.h"
#include "gradwire/learn.h"

namespace gradwire {
namespace {

// A sample of 2^18 elements per step: small against a gradient, large against the few numbers that are learned from it.
constexpr uint64_t kSampleBlocks = 256;

// No rank counts more than this. The largest sums that a codec has are of squares: 2^18 elements of a mean square of 1,
// in units of 2^-24 and with weights up to 2^12, make 2^54.
constexpr int64_t kMostCount = int64_t{1} << 55;
static_assert(kMostCount <= INT64_MAX / static_cast<int64_t>(Learner::kMostPooled));
// The squares of the least and of the greatest f32 are 2^-298 and 2^256, and a sum of 2^40 of them is beyond neither.
constexpr int64_t kMostExponent = 512;

// A codec that scales a tensor, or a rank's shard of it, as a whole is fitted to values in units of that scale. Its
// sample consists of blocks all over the tensor, and those of one tensor are one unit.
bool whole_units(const Codec& codec) { return scheme_of(codec).unit == 0; }

// What was seen of a run of units, or of the scales of a tensor. Statistics are made of all that a step showed at once,
// in the order of (name, first), so that they do not depend on which tensors travelled together or on their receivers.
struct Observed {
  uint64_t name, first;  // element of the tensor
  uint64_t whole;        // the first element of the tensor's part that is encoded as a whole
  std::vector<float> values;
  std::vector<uint32_t> scales;
  std::vector<uint32_t> lengths;  // of units
};

std::unique_ptr<Fitter> make_fitter(const Codec& codec, const FitContext& context) {
  const CodecDef& def = definition_of(codec);
  if (!def.fitter)
    throw Error(ErrorKind::usage, fmt::format("codec is {}, which learns nothing", codec.name()), "codec");
  return def.fitter(codec, context);
}

}  // namespace

struct Learner::State {
  Codec base;
  std::unique_ptr<Fitter> fitter;
  uint64_t elements = 0;
  uint64_t sample_blocks = kSampleBlocks;
  std::vector<Observed> seen;

  // Enqueued, not yet there: one entry for each observe() since the last collect().
  struct Awaited {
    std::span<const float> sample;
    std::span<const uint32_t> scales;
    std::vector<Observed> coming;
  };
  std::vector<Awaited> awaited;
  std::vector<Pick> picks;

  // Takes every so many units of a tensor, others each step; which ones is a function of (name, unit, step). A run is a
  // unit of several blocks, or a block of several units.
  void choose(const Plan& plan, std::span<const uint32_t> which, uint64_t step, std::vector<Observed>& coming) {
    picks.clear();
    const uint64_t unit = whole_units(base) ? kBlock : scheme_of(base).unit, run = std::max<uint64_t>(unit, kBlock);
    const uint64_t wanted = std::max<uint64_t>(1, sample_blocks / (run / kBlock)),
                   stride = std::max<uint64_t>(1, div_up(div_up(elements, run), wanted));
    for (uint32_t tensor : which) {
      const TensorSpec& spec = plan.tensors()[tensor];
      const uint64_t name = name_of(spec), before = spec.first / run, skip = (mix64(name) + step + before) % stride;
      for (uint64_t at = skip == 0 ? 0 : stride - skip; at * run < spec.count; at += stride) {
        const uint64_t first = at * run, here = std::min(run, spec.count - first);
        Observed one{name, spec.first + first, spec.first, std::vector<float>(here), {}, {}};
        for (uint64_t part = 0; part < here; part += unit)
          one.lengths.push_back(static_cast<uint32_t>(std::min(unit, here - part)));
        for (uint64_t block = first / kBlock; block * kBlock < first + here; ++block) picks.push_back({tensor, block});
        coming.push_back(std::move(one));
      }
    }
  }

  void expect_scales(const Plan& plan, std::span<const uint32_t> which, std::vector<Observed>& coming) {
    for (uint32_t tensor : which) {
      const TensorSpec& spec = plan.tensors()[tensor];
      const Scheme& scheme = scheme_of(spec.codec);
      if (!scheme.scale_words) continue;
      Observed one{
          name_of(spec), spec.first, spec.first, {}, std::vector<uint32_t>(unit_count(scheme, spec.count)), {}};
      for (uint64_t unit = 0; unit < one.scales.size(); ++unit)
        one.lengths.push_back(static_cast<uint32_t>(std::min<uint64_t>(scheme.unit, spec.count - unit * scheme.unit)));
      coming.push_back(std::move(one));
    }
  }

  FitStats stats() {
    std::sort(seen.begin(), seen.end(), [](const Observed& a, const Observed& b) {
      return std::tie(a.name, a.first) < std::tie(b.name, b.first);
    });
    std::vector<float> values;
    std::vector<uint32_t> words, lengths;
    size_t count = 0;
    for (const Observed& one : seen) count += one.values.size();
    values.reserve(count);
    const Observed* before = nullptr;
    for (const Observed& one : seen) {
      values.insert(values.end(), one.values.begin(), one.values.end());
      words.insert(words.end(), one.scales.begin(), one.scales.end());
      const bool more = before && before->name == one.name && before->whole == one.whole;
      if (whole_units(base) && more)
        lengths.back() += static_cast<uint32_t>(one.values.size());
      else
        lengths.insert(lengths.end(), one.lengths.begin(), one.lengths.end());
      before = &one;
    }
    FitStats all{FitStats::kNone, std::vector<int64_t>(fitter->counts())};
    if (seen.empty()) return all;
    if (fitter->source() == Fitter::Source::scales)
      fitter->observe_scales(words, lengths, all);
    else
      fitter->observe(values, lengths, all);
    return all;
  }

  static uint64_t name_of(const TensorSpec& spec) { return spec.name_hash ? *spec.name_hash : hash_name(spec.name); }
};

Learner::Learner(const Codec& codec, uint64_t elements, int world, uint64_t steps, double share)
    : state_(std::make_unique<State>()) {
  state_->base = codec;
  state_->fitter = make_fitter(codec, {.elements = elements, .world = world, .steps = steps, .share = share});
  state_->elements = elements;
}
Learner::~Learner() = default;
Learner::Learner(Learner&&) noexcept = default;
Learner& Learner::operator=(Learner&&) noexcept = default;

const Codec& Learner::base() const { return state_->base; }
Codec Learner::codec(uint64_t step, double rate) const { return state_->fitter->codec(step, rate); }
bool Learner::observes(uint64_t step) const { return state_->fitter->due(step); }
std::string Learner::plan() const { return state_->fitter->plan(); }
bool Learner::ahead() const { return state_->fitter->ahead(); }

void Learner::observe(Runner& runner, std::span<const uint32_t> which, uint64_t step,
                      std::span<const void* const> tensors, const Residuals* residuals,
                      std::span<const std::byte> message) {
  State& s = *state_;
  State::Awaited& next = s.awaited.emplace_back();
  if (s.fitter->source() == Fitter::Source::scales) {
    s.expect_scales(runner.plan(), which, next.coming);
    next.scales = runner.scales(message, which);
  } else {
    s.choose(runner.plan(), which, step, next.coming);
    next.sample = runner.sample(tensors, residuals, s.picks);
  }
}

void Learner::collect() {
  State& s = *state_;
  for (auto& [sample, scales, coming] : s.awaited)
    for (Observed& one : coming) {
      std::copy_n(scales.begin(), one.scales.size(), one.scales.begin());
      scales = scales.subspan(one.scales.size());
      std::copy_n(sample.begin(), one.values.size(), one.values.begin());
      sample = sample.subspan(div_up(one.values.size(), kBlock) * kBlock);
      s.seen.push_back(std::move(one));
    }
  s.awaited.clear();
}

void Learner::discard() {
  state_->awaited.clear();
  state_->seen.clear();
}

size_t Learner::stats_bytes() const { return (1 + state_->fitter->counts()) * sizeof(int64_t); }

void Learner::take_stats(std::span<std::byte> out) {
  const FitStats all = state_->stats();
  std::memcpy(out.data(), &all.exponent, sizeof(int64_t));
  std::memcpy(out.data() + sizeof(int64_t), all.counts.data(), all.counts.size() * sizeof(int64_t));
  state_->seen.clear();
}

void Learner::check_stats(std::span<const std::byte> stats) const {
  const auto refuse = [](const std::string& words) {
    throw Error(ErrorKind::frame, "bad statistics: " + words, "statistics");
  };
  if (stats.size() != stats_bytes())
    refuse(fmt::format("they have {} bytes; {} has {}", stats.size(), base().name(), stats_bytes()));
  std::vector<int64_t> words(stats.size() / sizeof(int64_t));
  std::copy(stats.begin(), stats.end(), std::as_writable_bytes(std::span(words)).begin());
  if (words[0] != FitStats::kNone && (words[0] < -kMostExponent || words[0] > kMostExponent))
    refuse(fmt::format("their exponent is {}; allowed are {} to {}", words[0], -kMostExponent, kMostExponent));
  for (size_t i = 1; i < words.size(); ++i)
    if (words[i] < -kMostCount || words[i] > kMostCount)
      refuse(fmt::format("count {} is {}; allowed are magnitudes up to {}", i - 1, words[i], kMostCount));
}

void Learner::learn(uint64_t step, std::span<const std::span<const std::byte>> ranks) {
  // All are brought to the coarsest unit before they are added: the order of the ranks does not matter.
  std::vector<FitStats> all;
  int64_t coarsest = FitStats::kNone;
  for (const auto& bytes : ranks) {
    FitStats one{0, std::vector<int64_t>(state_->fitter->counts())};
    std::memcpy(&one.exponent, bytes.data(), sizeof(int64_t));
    std::memcpy(one.counts.data(), bytes.data() + sizeof(int64_t), one.counts.size() * sizeof(int64_t));
    coarsest = std::max(coarsest, one.exponent);
    all.push_back(std::move(one));
  }
  FitStats pooled{coarsest, std::vector<int64_t>(state_->fitter->counts())};
  for (const FitStats& one : all) pooled.add(one);
  state_->fitter->learn(step, pooled);
}

std::vector<std::byte> Learner::save() const {
  const std::vector<uint64_t> words = state_->fitter->save();
  const auto bytes = std::as_bytes(std::span(words));  // there may be none, which memcpy would not take
  return {bytes.begin(), bytes.end()};
}

void Learner::restore(std::span<const std::byte> state) {
  if (state.size() % sizeof(uint64_t) != 0)
    throw Error(ErrorKind::frame, fmt::format("learned state has {} bytes; expected a multiple of 8", state.size()),
                "learned");
  std::vector<uint64_t> words(state.size() / sizeof(uint64_t));
  std::copy(state.begin(), state.end(), std::as_writable_bytes(std::span(words)).begin());
  state_->fitter->restore(words);
}

Codec fit(const Codec& codec, const void* tensor, uint64_t count, DType dtype, const Device& device) {
  if (!codec.traits().learns || count == 0) return codec;
  // Warming up and the pace of refitting are for runs. One tensor is fitted at once, and observed as a whole unless it
  // is huge.
  Learner learner(alone_of(codec), count, 1);
  learner.state_->sample_blocks = 64 * kSampleBlocks;
  const Plan plan({{"", count, dtype, learner.codec(0)}});
  const auto runner = make_runner(plan, device);
  const void* in[] = {tensor};
  const uint32_t which[] = {0};
  const std::shared_ptr<Memory> memory = memory_of(device);
  const auto release = [memory](std::byte* data) { memory->release(data); };
  const std::unique_ptr<std::byte, decltype(release)> room(
      static_cast<std::byte*>(memory->allocate(plan.message_bytes())), release);
  const std::span<std::byte> message(room.get(), plan.message_bytes());
  if (learner.ahead()) runner->encode(in, {}, message);
  if (learner.observes(0)) {
    learner.observe(*runner, which, 0, in, nullptr, message);
    runner->wait();
    learner.collect();
    std::vector<std::byte> stats(learner.stats_bytes());
    learner.take_stats(stats);
    const std::span<const std::byte> ranks[] = {stats};
    learner.learn(0, ranks);
  }
  return codec.fitted(learner.codec(learner.ahead() ? 0 : 1).table());
}

}  // namespace gradwire
