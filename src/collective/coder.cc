// SPDX-License-Identifier: Apache-2.0
// The public side of the coding core: ModelCoder is a ModelCore, BucketCoder a BucketCore whose messages lie in slots
// of one buffer.
#include "gradwire/coder.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "collective/model_core.h"
#include "core/bits.h"
#include "core/refuse.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

using Kind = CoderOptions::Kind;
constexpr size_t kSlot = 16;  // messages begin at multiples of it

// Messages, and the slots that they lie in.
struct Slots {
  std::vector<size_t> messages, slots;

  void set(std::vector<size_t> sizes) {
    messages = std::move(sizes);
    slots.clear();
    for (size_t bytes : messages) slots.push_back((bytes + kSlot - 1) / kSlot * kSlot);
  }
  // Makes all slots equally large where that costs at most an eighth. An all-gather needs that, and it uses a link
  // better than an all-to-all, in which all ranks send to all ranks at once.
  void even_out() {
    const size_t largest = *std::max_element(slots.begin(), slots.end()), sum = total();
    if (largest * slots.size() <= sum + sum / 8) slots.assign(slots.size(), largest);
  }
  size_t total() const { return std::accumulate(slots.begin(), slots.end(), size_t{0}); }
  template <class Byte>
  std::vector<std::span<Byte>> cut(std::span<Byte> buffer, const char* what) const {
    if (buffer.size() != total())
      refuse_usage(fmt::format("{} has {} bytes; the slots have {}", what, buffer.size(), total()), what);
    std::vector<std::span<Byte>> cut;
    for (size_t p = 0, at = 0; p < slots.size(); at += slots[p++]) cut.push_back(buffer.subspan(at, messages[p]));
    return cut;
  }
};

}  // namespace

struct ModelCoder::State : ModelCore {
  using ModelCore::ModelCore;
};

ModelCoder::ModelCoder(std::vector<NamedTensor> tensors, const CoderOptions& options) {
  if (options.reduce.commit == ReduceOptions::Commit::manual)
    refuse_usage("commit is manual; with a ModelCoder the caller ends a step with end() or abandon()", "commit");
  state_ = std::make_unique<State>(std::move(tensors), options);
  for (const Learning* one : state_->learnings)
    if (one->ahead())
      throw Error(
          ErrorKind::unsupported,
          "a codec with mode=paper must see a whole step before any of it is sent, which buckets that leave one by one "
          "do not allow; its default mode decides from the step before",
          "mode");
}
ModelCoder::~ModelCoder() = default;

std::vector<std::pair<std::string, std::string>> ModelCoder::handshake() const {
  const Handshake handshake = state_->job.handshake();
  std::vector<std::pair<std::string, std::string>> all;
  for (const HandshakeField& field : handshake.common) all.emplace_back(field.name, field.text);
  for (const auto& tensor : handshake.tensors)
    for (const HandshakeField& field : tensor) all.emplace_back(field.name, field.text);
  return all;
}

void ModelCoder::begin(uint64_t step, const StepOptions& how) { state_->begin(step, how); }

void ModelCoder::check_finite(std::span<float> values) {
  state_->check_open("check_finite");
  const ResultSpan span{values.data(), values.size(), DType::f32};
  state_->finite.check(state_->options.reduce.device, std::span(&span, 1));
}

void ModelCoder::end() { state_->end(); }
void ModelCoder::abandon() { state_->abandon(); }

bool ModelCoder::learns() const { return !state_->learnings.empty(); }
bool ModelCoder::teaches() const {
  const State& s = *state_;
  return s.step && !s.how.exact && gradwire::stats_bytes(s.learnings, *s.step, false) > 0;
}

size_t ModelCoder::stats_bytes() const {
  state_->settle();
  return state_->taught ? gradwire::stats_bytes(state_->learnings, *state_->taught, false) : 0;
}

void ModelCoder::take_stats(std::span<std::byte> out) {
  State& s = *state_;
  if (!s.taught || out.size() != stats_bytes())
    refuse_usage(fmt::format("out has {} bytes; the statistics have {}", out.size(), stats_bytes()), "out");
  gradwire::take_stats(s.learnings, *s.taught, false, out);
}

void ModelCoder::learn(std::span<const std::byte> all_ranks) {
  State& s = *state_;
  const size_t expected = stats_bytes() * static_cast<size_t>(s.options.world);
  if (!s.taught || all_ranks.size() != expected)
    refuse_usage(
        fmt::format("the statistics of {} ranks have {} bytes; got {}", s.options.world, expected, all_ranks.size()),
        "all_ranks");
  gradwire::learn(s.learnings, *s.taught, false, all_ranks, s.options.world);
  s.taught.reset();
  s.save_learned();
}

void ModelCoder::exempt(size_t tensor) {
  state_->check_tensor(tensor);
  state_->up_learning.exempt(tensor);
  state_->down_learning.exempt(tensor);
}

std::vector<Codec> ModelCoder::codecs(Direction direction) const {
  return direction == Direction::up ? state_->job.up : state_->job.down;
}
ErrorFeedback& ModelCoder::feedback() { return state_->feedback; }
const std::vector<NamedTensor>& ModelCoder::tensors() const { return state_->job.tensors; }
bool ModelCoder::divisible(size_t tensor) const {
  state_->check_tensor(tensor);
  return state_->divisible[tensor];
}
std::vector<std::string> ModelCoder::plans() const {
  std::vector<std::string> all;
  for (const Learning* one : state_->learnings)
    for (std::string& plan : one->plans()) all.push_back(std::move(plan));
  return all;
}
uint64_t ModelCoder::skipped() const { return state_->finite.skipped(); }

void ModelCoder::restore(ErrorFeedback&& state) {
  State& s = *state_;
  s.abandon();
  s.forget();
  s.feedback = std::move(state);
  for (Learning* one : s.learnings) one->restore(s.feedback);
  s.save_learned();
  ++s.restored;
}

struct BucketCoder::State {
  State(ModelCore& m, std::vector<size_t> list, const Device& d, uint64_t part, uint64_t parts)
      : model(m),
        tensors(std::move(list)),
        device(d),
        memory(memory_of(d)),
        core(m.job, m.self(), d, m.bucket(tensors, part, parts), Messages::in_place, m.epochs) {
    measure();
  }

  void measure() {
    if (core.has_up()) {
      const auto world = static_cast<size_t>(model.options.world);
      std::vector<size_t> sizes = core.up_sent();
      if (core.gathers()) sizes.resize(world, sizes[0]);  // one message for all ranks
      up_send.set(std::move(sizes));
      up_recv.set(std::vector<size_t>(world, core.up_received()));
    }
    if (core.has_down()) {
      down_recv.set(core.down_bytes());
      down_recv.even_out();
    }
  }

  uint64_t step() const {
    model.check_open("bucket");
    return *model.step;
  }

  void expect_up() const {
    if (!core.has_up()) refuse_usage("an all_gather has no way up", "kind");
  }
  void expect_down() const {
    if (!core.has_down()) refuse_usage("there is no way down: reduce_scatter and gather end with decode_up", "kind");
  }

  // Pointers by the model's list of tensors, from those by this bucket's.
  template <class Pointer>
  std::vector<Pointer> spread(std::span<const Pointer> own, const char* what) const {
    if (own.size() != tensors.size())
      refuse_usage(fmt::format("{} has {} pointers; the bucket has {} tensors", what, own.size(), tensors.size()),
                   what);
    std::vector<Pointer> all(model.job.tensors.size());
    for (size_t i = 0; i < own.size(); ++i) {
      if (!own[i] && model.job.tensors[tensors[i]].count > 0)
        refuse_usage(fmt::format("{} is null for tensor '{}'", what, model.job.tensors[tensors[i]].name), what);
      all[tensors[i]] = own[i];
    }
    return all;
  }

  ModelCore& model;
  std::vector<size_t> tensors;
  Device device;
  std::shared_ptr<Memory> memory;
  Slots up_send, up_recv, down_recv;
  BucketCore core;
};

BucketCoder::BucketCoder(ModelCoder& model, std::vector<size_t> tensors, const Device& device, uint64_t part,
                         uint64_t parts)
    : state_(std::make_unique<State>(*model.state_, std::move(tensors), device, part, parts)) {}
BucketCoder::~BucketCoder() = default;

void BucketCoder::begin(std::span<const uint8_t> idle) {
  State& s = *state_;
  s.step();
  if (s.core.follow(s.model.epochs)) s.measure();
  std::vector<uint8_t> all;
  if (!idle.empty()) {
    if (idle.size() != s.tensors.size())
      refuse_usage(fmt::format("idle has {} entries; the bucket has {} tensors", idle.size(), s.tensors.size()),
                   "idle");
    all.resize(s.model.job.tensors.size());
    for (size_t i = 0; i < idle.size(); ++i) all[s.tensors[i]] = idle[i];
  }
  s.core.begin(s.model.context(all));
}

uint64_t BucketCoder::signature() const {
  const State& s = *state_;
  // A rank that owns no shard of this bucket has no residual here whose address could tell these apart.
  uint64_t hash = s.core.signature();
  for (const uint64_t word : {s.model.ended & 1, s.model.restored, uint64_t{float_bits(s.model.how.loss_scale)}})
    hash = mix64(hash ^ word) + word;
  return hash;
}
void BucketCoder::poll() {
  for (const Direction direction : {Direction::up, Direction::down})
    if (direction == Direction::up ? state_->core.has_up() : state_->core.has_down()) state_->core.poll(direction);
}

const std::vector<size_t>& BucketCoder::up_send() const { return state_->up_send.slots; }
const std::vector<size_t>& BucketCoder::up_recv() const { return state_->up_recv.slots; }
const std::vector<size_t>& BucketCoder::down_recv() const { return state_->down_recv.slots; }

void BucketCoder::encode_up(std::span<const void* const> in, std::span<std::byte> send) {
  State& s = *state_;
  s.expect_up();
  const std::vector<Bytes> to = s.up_send.cut(send, "send");
  s.core.encode_up(s.step(), s.spread(in, "in"), to, s.model.learning(Direction::up));
  if (!s.core.gathers()) return;
  for (size_t p = 1; p < to.size(); ++p) s.memory->copy(to[p].data(), to[0].data(), to[0].size());
}

void BucketCoder::decode_own(std::span<const std::byte> send, std::span<void* const> out) {
  State& s = *state_;
  s.expect_up();
  s.core.decode_own(s.step(), s.up_send.cut(send, "send"), s.spread(out, "out"));
}

void BucketCoder::decode_up(std::span<const std::byte> recv, std::span<void* const> out) {
  State& s = *state_;
  s.expect_up();
  const std::vector<Shard>& mine = s.core.up_shards();
  std::vector<void*> to;
  if (s.model.options.kind == Kind::reduce_scatter) {
    if (out.size() != mine.size())
      refuse_usage(fmt::format("out has {} pointers; this rank has {} tensors", out.size(), mine.size()), "out");
    to.assign(out.begin(), out.end());
  } else if (!s.core.has_down()) {
    to = locate(s.model.job, mine, std::span<void* const>(s.spread(out, "out")));
  }
  s.core.decode_up(s.step(), s.up_recv.cut(recv, "recv"), to);
  s.core.poll(Direction::up);
  if (!s.core.has_down()) s.model.finite.check(s.device, s.core.up_results(to));
}

void BucketCoder::read_means(std::span<void* const> out) {
  State& s = *state_;
  if (!s.core.has_up() || !s.core.has_down())
    refuse_usage("only an all_reduce by scatter keeps means for the way down", "kind");
  if (out.size() != s.tensors.size())
    refuse_usage(fmt::format("out has {} pointers; the bucket has {} tensors", out.size(), s.tensors.size()), "out");
  std::vector<void*> all(s.model.job.tensors.size());
  for (size_t i = 0; i < out.size(); ++i) {
    if (const NamedTensor& tensor = s.model.job.tensors[s.tensors[i]]; out[i] && tensor.dtype != DType::f32)
      refuse_usage(fmt::format("tensor '{}' is not of f32, and means are", tensor.name), "out");
    all[s.tensors[i]] = out[i];
  }
  s.core.read_sums(all);
}

void BucketCoder::encode_down(std::span<std::byte> mine, std::span<const void* const> values) {
  State& s = *state_;
  s.expect_down();
  const auto rank = static_cast<size_t>(s.model.options.rank);
  const size_t bytes = s.down_recv.messages[rank], slot = s.down_recv.slots[rank];
  if (mine.size() != slot) refuse_usage(fmt::format("mine has {} bytes; the slot has {}", mine.size(), slot), "mine");
  if (const size_t own = s.core.has_up() ? 0 : s.core.down_shards().size(); values.size() != own)
    refuse_usage(fmt::format("values has {} pointers; expected are {}", values.size(), own), "values");
  s.core.encode_down(s.step(), mine.first(bytes), values, s.model.learning(Direction::down));
}

void BucketCoder::decode_down(std::span<const std::byte> recv, std::span<void* const> out) {
  State& s = *state_;
  s.expect_down();
  const std::vector<void*> all = s.spread(out, "out");
  s.core.decode_down(s.step(), s.down_recv.cut(recv, "recv"), all);
  s.core.poll(Direction::down);
  s.model.finite.check(s.device, s.core.down_results(all));
}

}  // namespace gradwire
