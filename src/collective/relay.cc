// SPDX-License-Identifier: Apache-2.0
#include "gradwire/relay.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>

#include "collective/coding.h"
#include "collective/sums.h"
#include "device/verdict.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

using Kind = RelayOptions::Kind;
constexpr size_t kSlot = 16;  // messages begin at multiples of it

size_t slot_of(size_t bytes) { return (bytes + kSlot - 1) / kSlot * kSlot; }

const char* name_of(Kind kind, bool scatter) {
  if (kind == Kind::reduce_scatter) return "reduce_scatter";
  if (kind == Kind::all_gather) return "all_gather";
  return scatter ? "scatter" : "gather";
}

[[noreturn]] void refuse(const std::string& words, const char* field) { throw Error(ErrorKind::usage, words, field); }

// Messages, and the slots that they lie in.
struct Slots {
  std::vector<size_t> messages, slots;

  void set(std::vector<size_t> sizes) {
    messages = std::move(sizes);
    slots.clear();
    for (size_t bytes : messages) slots.push_back(slot_of(bytes));
  }
  // Slots of one size, where that costs at most an eighth: all-gathers want it, and those are kinder to a link than
  // all-to-alls, in which everybody sends to everybody at once.
  void even_out() {
    const size_t largest = *std::max_element(slots.begin(), slots.end()),
                 sum = std::accumulate(slots.begin(), slots.end(), size_t{0});
    if (largest * slots.size() <= sum + sum / 8) slots.assign(slots.size(), largest);
  }
  template <class Byte>
  std::vector<std::span<Byte>> cut(std::span<Byte> buffer, const char* what) const {
    const size_t sum = std::accumulate(slots.begin(), slots.end(), size_t{0});
    if (buffer.size() != sum) refuse(fmt::format("{} has {} bytes; the slots have {}", what, buffer.size(), sum), what);
    std::vector<std::span<Byte>> cut;
    for (size_t p = 0, at = 0; p < slots.size(); at += slots[p++]) cut.push_back(buffer.subspan(at, messages[p]));
    return cut;
  }
};

}  // namespace

struct RelayModel::State {
  State(std::vector<NamedTensor> tensors, const RelayOptions& o)
      : options(o),
        scatter(o.kind != Kind::all_reduce || o.reduce.method == ReduceOptions::Method::scatter),
        job(name_of(o.kind, scatter), tensors, o.reduce),
        feedback(o.reduce.residual, o.reduce.device),
        up_learning(job, Side::up, o.world),
        down_learning(job, Side::down, o.world),
        verdict(o.reduce.device) {
    if (o.world < 1 || o.rank < 0 || o.rank >= o.world)
      refuse(fmt::format("rank is {} of {}; expected 0 to world - 1", o.rank, o.world), "rank");
    if (has_up()) learnings.push_back(&up_learning);
    if (has_down()) learnings.push_back(&down_learning);
    if (std::any_of(learnings.begin(), learnings.end(), [](const Learning* one) { return one->ahead(); }))
      throw Error(ErrorKind::unsupported,
                  "dqsgd:mode=paper must see a whole step before any of it is sent, which buckets that leave one by "
                  "one do not allow; "
                  "the default mode decides from the step before",
                  "mode");
    // From the start, so that a state holds the same names whenever it is saved.
    if (has_up()) job.add_residuals(feedback, job.whole(), Side::up);
    if (has_down()) job.add_residuals(feedback, owned(), Side::down);
    // By the rules, not by the codecs of a step: it must not change, and be the same on all ranks at any moment.
    for (size_t i = 0; i < job.tensors.size(); ++i)
      divisible.push_back(o.kind == Kind::all_reduce && scatter && job.up[i].traits().unit != 0 &&
                          job.down[i].traits().unit != 0);
    keep();
  }

  // Every shard with its owner.
  std::vector<Shard> dealt() const {
    if (options.kind == Kind::all_reduce) return shards(job.tensors, options.world);
    std::vector<Shard> all = job.whole();
    for (Shard& shard : all) shard.owner = static_cast<int>(shard.tensor % static_cast<size_t>(options.world));
    return all;
  }
  std::vector<Shard> owned() const { return Job::of_owner(dealt(), options.rank); }

  bool has_up() const { return options.kind != Kind::all_gather; }
  bool has_down() const { return options.kind == Kind::all_gather || (options.kind == Kind::all_reduce && scatter); }

  void keep() {
    for (const Learning* one : learnings) one->keep(feedback);
  }
  std::vector<Codec> chosen(const Learning& learning, uint64_t at, const RelayStep& how) const {
    return how.exact ? std::vector<Codec>(job.tensors.size()) : learning.codecs(at, how.rate);
  }
  size_t evidence_bytes() const {
    size_t bytes = 0;
    for (const Learning* one : learnings) bytes += taught ? one->evidence_bytes(*taught, false) : 0;
    return bytes;
  }
  void take_evidence(std::span<std::byte> out) {
    for (Learning* one : learnings) {
      const size_t bytes = one->evidence_bytes(*taught, false);
      one->take_evidence(*taught, false, out.first(bytes));
      out = out.subspan(bytes);
    }
  }
  // A step that is skipped or given up teaches nothing.
  void forget() {
    std::vector<std::byte> nothing(evidence_bytes());
    if (!nothing.empty()) take_evidence(nothing);
    taught.reset();
  }
  void check_tensor(size_t tensor) const {
    if (tensor >= job.tensors.size())
      refuse(fmt::format("tensor is {}; there are {}", tensor, job.tensors.size()), "tensor");
  }
  void check_open(const char* what) const {
    if (!step) refuse(fmt::format("{}: no step is open; begin one first", what), "step");
  }

  RelayOptions options;
  bool scatter;
  Job job;
  ErrorFeedback feedback;
  Learning up_learning, down_learning;
  std::vector<Learning*> learnings;  // those of the ways that there are
  Verdict verdict;
  std::vector<bool> divisible;
  uint64_t epoch = 0;                    // of the codecs
  std::optional<uint64_t> step, taught;  // the open one, and one that has been seen but not yet learned from
  RelayStep how;
};

RelayModel::RelayModel(std::vector<NamedTensor> tensors, const RelayOptions& options)
    : state_(std::make_unique<State>(std::move(tensors), options)) {}
RelayModel::~RelayModel() = default;

std::vector<std::pair<std::string, std::string>> RelayModel::terms() const {
  const Terms terms = state_->job.terms();
  std::vector<std::pair<std::string, std::string>> all;
  for (const Term& term : terms.common) all.emplace_back(term.field, term.text);
  for (const auto& tensor : terms.tensors)
    for (const Term& term : tensor) all.emplace_back(term.field, term.text);
  return all;
}

void RelayModel::begin(uint64_t step, const RelayStep& how) {
  State& s = *state_;
  if (s.step) give_up();
  if (!(how.loss_scale > 0) || how.loss_scale > 3e38f)
    refuse(fmt::format("loss_scale is {}; it must be finite and above 0", how.loss_scale), "loss_scale");
  s.forget();
  std::vector<Codec> up = s.chosen(s.up_learning, step, how), down = s.chosen(s.down_learning, step, how);
  if (up != s.job.up || down != s.job.down) {
    s.job.up = std::move(up);
    s.job.down = std::move(down);
    ++s.epoch;
  }
  s.step = step;
  s.how = how;
}

void RelayModel::look(std::span<float> values) {
  State& s = *state_;
  s.check_open("look");
  const ResultSpan span{values.data(), values.size(), DType::f32};
  s.verdict.look(s.options.reduce.device, std::span(&span, 1));
}

void RelayModel::end() {
  State& s = *state_;
  s.check_open("end");
  s.taught = s.how.exact ? std::nullopt : s.step;
  if (s.evidence_bytes() == 0) s.taught.reset();
  const bool bad = s.taught && s.verdict.bad();  // on a GPU this waits: only where there is something to learn
  s.feedback.decide(*s.step, s.verdict, s.options.reduce.device);
  s.verdict.close(s.options.reduce.device);
  s.step.reset();
  if (bad) s.forget();
}

void RelayModel::give_up() {
  State& s = *state_;
  if (!s.step) return;
  s.feedback.rollback(*s.step);
  s.verdict.close(s.options.reduce.device);
  s.taught = s.step;
  s.forget();
  s.step.reset();
}

size_t RelayModel::evidence_bytes() const { return state_->evidence_bytes(); }

void RelayModel::take_evidence(std::span<std::byte> out) {
  State& s = *state_;
  if (!s.taught || out.size() != s.evidence_bytes())
    refuse(fmt::format("out has {} bytes; the evidence has {}", out.size(), s.evidence_bytes()), "out");
  s.take_evidence(out);
}

void RelayModel::learn(std::span<const std::byte> all_ranks) {
  State& s = *state_;
  const size_t bytes = s.evidence_bytes(), world = static_cast<size_t>(s.options.world);
  if (!s.taught || all_ranks.size() != bytes * world)
    refuse(fmt::format("the evidence of {} ranks has {} bytes; got {}", world, bytes * world, all_ranks.size()),
           "all_ranks");
  size_t at = 0;
  for (Learning* one : s.learnings) {
    const size_t here = one->evidence_bytes(*s.taught, false);
    std::vector<std::span<const std::byte>> ranks;
    for (size_t rank = 0; rank < world; ++rank) ranks.push_back(all_ranks.subspan(rank * bytes + at, here));
    one->learn(*s.taught, false, ranks);
    at += here;
  }
  s.taught.reset();
  s.keep();
}

void RelayModel::exempt(size_t tensor) {
  State& s = *state_;
  s.check_tensor(tensor);
  s.up_learning.release(tensor);
  s.down_learning.release(tensor);
}

std::vector<Codec> RelayModel::codecs(Side side) const { return side == Side::up ? state_->job.up : state_->job.down; }
ErrorFeedback& RelayModel::feedback() { return state_->feedback; }
const std::vector<NamedTensor>& RelayModel::tensors() const { return state_->job.tensors; }
bool RelayModel::divisible(size_t tensor) const {
  const State& s = *state_;
  s.check_tensor(tensor);
  return s.divisible[tensor];
}
uint64_t RelayModel::skipped() const { return state_->verdict.skipped(); }

void RelayModel::restore(ErrorFeedback&& state) {
  State& s = *state_;
  give_up();
  s.forget();
  s.feedback = std::move(state);
  for (Learning* one : s.learnings) one->restore(s.feedback);
  s.keep();
}

struct Relay::State {
  State(RelayModel::State& m, std::vector<size_t> list, const Device& d, uint64_t part, uint64_t parts)
      : model(m), tensors(std::move(list)), device(d), memory(memory_of(d)) {
    if (part >= parts) refuse(fmt::format("part is {} of {}", part, parts), "part");
    const Job& job = m.job;
    std::set<size_t> distinct(tensors.begin(), tensors.end());
    if (distinct.size() != tensors.size() || (!distinct.empty() && *distinct.rbegin() >= job.tensors.size()))
      refuse("tensors of a relay are distinct indices of the model's list", "tensors");
    const int world = m.options.world;
    const Seat seat{m.options.rank, world};
    ShardLists lists(static_cast<size_t>(world)), all(1);
    for (const Shard& shard : m.dealt())
      if (distinct.contains(shard.tensor))
        if (const Shard own = part_of(shard, part, parts); own.count > 0)
          lists[static_cast<size_t>(own.owner)].push_back(own);
    for (size_t tensor : distinct)
      if (job.tensors[tensor].count > 0) all[0].push_back({tensor, 0, job.tensors[tensor].count, 0});
    if (m.has_up()) up.emplace(job, seat, device, m.scatter ? lists : all);
    if (m.has_down()) down.emplace(job, seat, device, lists, m.options.kind == Kind::all_reduce);
    staging = std::make_unique<Staging>(memory, true);
    if (up) sums.emplace(memory, job, up->mine(), !halfway());
    measure();
    epoch = m.epoch;
  }

  // Cut at grains, so that no unit is in two parts.
  static Shard part_of(const Shard& shard, uint64_t part, uint64_t parts) {
    const uint64_t grains = (shard.count + kPieceGrain - 1) / kPieceGrain;
    const uint64_t first = std::min(shard.count, grains * part / parts * kPieceGrain),
                   end = std::min(shard.count, grains * (part + 1) / parts * kPieceGrain);
    return {shard.tensor, shard.first + first, end - first, shard.owner};
  }

  // The results come with decode_down.
  bool halfway() const { return up && down; }

  void measure() {
    if (up) {
      const auto world = static_cast<size_t>(model.options.world);
      std::vector<size_t> written = up->written();
      if (written.size() == 1) written.resize(world, written[0]);  // gather: one for everybody
      sent.set(std::move(written));
      received.set(std::vector<size_t>(world, up->read()));
    }
    if (down) {
      downs.set(down->read());
      downs.even_out();
    }
  }

  uint64_t step() const {
    model.check_open("relay");
    return *model.step;
  }

  // Pointers by the model's list, from those by this relay's.
  template <class Pointer>
  std::vector<Pointer> spread(std::span<const Pointer> own, const char* what) const {
    if (own.size() != tensors.size())
      refuse(fmt::format("{} has {} pointers; the relay has {} tensors", what, own.size(), tensors.size()), what);
    std::vector<Pointer> all(model.job.tensors.size());
    for (size_t i = 0; i < own.size(); ++i) {
      if (!own[i] && model.job.tensors[tensors[i]].count > 0)
        refuse(fmt::format("{} is null for tensor '{}'", what, model.job.tensors[tensors[i]].name), what);
      all[tensors[i]] = own[i];
    }
    return all;
  }

  // Results that lie there.
  void add(std::vector<ResultSpan>& results, std::span<const Shard> shards, std::span<void* const> at) const {
    for (size_t i = 0; i < shards.size(); ++i)
      results.push_back({at[i], shards[i].count, model.job.tensors[shards[i].tensor].dtype});
  }

  Learning* learning(Learning& one) { return model.how.exact ? nullptr : &one; }

  RelayModel::State& model;
  std::vector<size_t> tensors;
  Device device;
  std::shared_ptr<Memory> memory;
  std::optional<UpCoding> up;
  std::optional<DownCoding> down;
  std::optional<Sums> sums;
  Slots sent, received, downs;
  uint64_t epoch;
  std::unique_ptr<Staging> staging;  // last: it waits before the rest goes
};

Relay::Relay(RelayModel& model, std::vector<size_t> tensors, const Device& device, uint64_t part, uint64_t parts)
    : state_(std::make_unique<State>(*model.state_, std::move(tensors), device, part, parts)) {}
Relay::~Relay() = default;

void Relay::begin(std::span<const uint8_t> idle) {
  State& s = *state_;
  s.model.check_open("relay");
  if (s.epoch != s.model.epoch) {
    if (s.up) s.up->recode();
    if (s.down) s.down->recode();
    s.measure();
    s.epoch = s.model.epoch;
  }
  std::vector<uint8_t> all;
  if (!idle.empty()) {
    if (idle.size() != s.tensors.size())
      refuse(fmt::format("idle has {} entries; the relay has {} tensors", idle.size(), s.tensors.size()), "idle");
    all.resize(s.model.job.tensors.size());
    for (size_t i = 0; i < idle.size(); ++i) all[s.tensors[i]] = idle[i];
  }
  const StepContext context{*s.model.step, &s.model.feedback, s.model.how.loss_scale, all};
  if (s.up) s.up->begin(context);
  if (s.down) s.down->begin(context);
}

const std::vector<size_t>& Relay::up_send() const { return state_->sent.slots; }
const std::vector<size_t>& Relay::up_recv() const { return state_->received.slots; }
const std::vector<size_t>& Relay::down_recv() const { return state_->downs.slots; }

void Relay::encode_up(std::span<const void* const> in, std::span<std::byte> send) {
  State& s = *state_;
  if (!s.up) refuse("an all_gather has no way up", "kind");
  const std::vector<Bytes> to = s.sent.cut(send, "send");
  s.up->encode(s.step(), s.spread(in, "in"), to, *s.staging, s.learning(s.model.up_learning));
  if (s.model.scatter) return;
  for (size_t p = 1; p < to.size(); ++p) s.memory->copy(to[p].data(), to[0].data(), to[0].size());
}

void Relay::decode_own(std::span<const std::byte> send, std::span<void* const> out) {
  State& s = *state_;
  if (!s.up) refuse("an all_gather has no way up", "kind");
  s.up->decode_own(s.step(), s.sent.cut(send, "send"), s.spread(out, "out"), *s.staging);
}

void Relay::decode_up(std::span<const std::byte> recv, std::span<void* const> out) {
  State& s = *state_;
  if (!s.up) refuse("an all_gather has no way up", "kind");
  const std::vector<Shard>& mine = s.up->mine();
  std::vector<void*> to;
  if (s.model.options.kind == Kind::reduce_scatter) {
    if (out.size() != mine.size())
      refuse(fmt::format("out has {} pointers; this rank has {} tensors", out.size(), mine.size()), "out");
    to.assign(out.begin(), out.end());
  } else if (!s.halfway()) {
    to = locate(s.model.job, mine, std::span<void* const>(s.spread(out, "out")));
  }
  const std::vector<float*> at = s.sums->places(to);
  s.up->decode(s.step(), s.received.cut(recv, "recv"), at, *s.staging);
  if (s.model.options.world > 1) finish_sums(s.model.job, s.device, s.model.options.world, mine, at);
  s.up->poll();
  if (s.halfway()) return;
  s.sums->round(s.device, to);
  std::vector<ResultSpan> results;
  s.add(results, mine, to);
  s.model.verdict.look(s.device, results);
}

void Relay::encode_down(std::span<std::byte> mine, std::span<const void* const> values) {
  State& s = *state_;
  if (!s.down) refuse("there is no way down: reduce_scatter and gather end with decode_up", "kind");
  const auto rank = static_cast<size_t>(s.model.options.rank);
  const size_t bytes = s.downs.messages[rank], slot = s.downs.slots[rank];
  if (mine.size() != slot) refuse(fmt::format("mine has {} bytes; the slot has {}", mine.size(), slot), "mine");
  std::vector<const void*> from(values.begin(), values.end());
  if (s.halfway()) {
    const std::vector<float*> at = s.sums->places({});
    from.assign(at.begin(), at.end());
  }
  if (from.size() != s.down->mine().size())
    refuse(fmt::format("values has {} pointers; this rank has {} tensors", from.size(), s.down->mine().size()),
           "values");
  s.down->encode(s.step(), from, mine.first(bytes), *s.staging, s.learning(s.model.down_learning));
}

void Relay::decode_down(std::span<const std::byte> recv, std::span<void* const> out) {
  State& s = *state_;
  if (!s.down) refuse("there is no way down: reduce_scatter and gather end with decode_up", "kind");
  const std::vector<void*> all = s.spread(out, "out");
  s.down->decode(s.step(), s.downs.cut(recv, "recv"), all, *s.staging);
  s.down->poll();
  std::vector<ResultSpan> results;
  for (const std::vector<Shard>& list : s.down->lists())
    s.add(results, list, locate(s.model.job, list, std::span<void* const>(all)));
  s.model.verdict.look(s.device, results);
}

}  // namespace gradwire
