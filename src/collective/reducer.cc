// SPDX-License-Identifier: Apache-2.0
// The all-reduce over an engine: the coding core (ModelCore, and one bucket of all tensors), an engine that moves the
// messages, and a CommandQueue that runs the steps in order. A step that fails is rolled back here, so that it changes
// no residual. On two levels the core sees nodes in place of ranks, and this rank's pieces in place of the tensors;
// what the ranks of a node do with each other comes before and after it. Where matrices travel as factors, the core
// sees factors in their place, and a FactorExchange turns the one into the other.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "collective/bucket_transfer.h"
#include "collective/command_queue.h"
#include "collective/factor_exchange.h"
#include "collective/model_core.h"
#include "collective/two_levels.h"
#include "core/bits.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

struct PendingStep final : Handle::State {
  explicit PendingStep(std::shared_ptr<CommandQueue::Ticket> t) : ticket(std::move(t)) {}
  void wait() override { ticket->wait(); }
  std::shared_ptr<CommandQueue::Ticket> ticket;
};

struct Request {
  uint64_t step = 0;
  std::vector<const void*> in = {};
  std::vector<void*> out = {};
  float loss_scale = 1;
  double rate = -1;
  std::optional<std::vector<size_t>> in_sizes, out_sizes;  // in floats, where the caller gave spans
};

// A span of the wrong size or type would be read or written out of bounds.
void check_floats(const Job& job, const std::optional<std::vector<size_t>>& sizes, const char* what) {
  for (size_t i = 0; sizes && i < sizes->size(); ++i) {
    const NamedTensor& tensor = job.tensors[i];
    if (tensor.dtype != DType::f32)
      throw Error(ErrorKind::usage,
                  fmt::format("{} is float, tensor '{}' is {}", what, tensor.name, name_of(tensor.dtype)), what);
    if (tensor.count != (*sizes)[i])
      throw Error(ErrorKind::usage,
                  fmt::format("{} has {} elements, tensor '{}' has {}", what, (*sizes)[i], tensor.name, tensor.count),
                  what);
  }
}

const char* method_name(const ReduceOptions& options) {
  return options.method == ReduceOptions::Method::scatter ? "scatter" : "gather";
}

}  // namespace

struct Reducer::State {
  State(Engine& e, const Device& device) : engine(e), queue(CommandQueue::of(e)), timer(device) {}

  void build(std::vector<NamedTensor> tensors, ReduceOptions options, std::optional<NodeLayout> layout = {}) {
    std::optional<FactorPlan> plan = FactorPlan::of(tensors, options);
    options.nodes = 0;
    size_t bare = 0;
    if (plan) {
      options.up = plan->without;
      whole.emplace(method_name(options), tensors, options);
      bare = 2 * plan->matrices.size();
      others = plan->others;
      tensors = plan->tensors;
      options.up = plan->up;
    }
    if (layout && layout->per_node() > 1) levels.emplace(engine, std::move(*layout), *whole, timer);
    Engine& peers = levels ? levels->between : engine;
    model.emplace(std::move(tensors), CoderOptions{.reduce = options, .rank = peers.rank(), .world = peers.size()},
                  levels ? levels->place() : JobPlace{}, bare);
    if (plan) rules = plan->text;
    if (bare > 0) factors.emplace(engine, std::move(*plan), *model, timer);
    if (levels) {
      if (options.op == ReduceOptions::Op::sum) model->input_scale = static_cast<float>(levels->layout.per_node());
      set_nodes(model->feedback, levels->state_nodes());
      model->save_learned();
    }
    std::vector<size_t> all(model->job.tensors.size() - bare);
    std::iota(all.begin(), all.end(), size_t{0});
    bucket.emplace(peers, model->job, model->bucket(all), timer);
    manual = options.commit == ReduceOptions::Commit::manual;
    for (const Learning* one : model->learnings)
      if (together() && one->ahead())
        throw Error(ErrorKind::usage,
                    "a codec looks at a step before it is sent, which takes the whole model in one reducer", "model");
  }

  // What ranks compare before they know their nodes.
  void join(const std::vector<NamedTensor>& tensors, ReduceOptions options) {
    FactorPlan::of(tensors, options);  // refuses what does not go together
    options.nodes = 0;
    whole.emplace(method_name(options), tensors, options);
  }

  Handle submit(Request request) {
    return Handle(std::make_unique<PendingStep>(queue->submit([this, request = std::move(request)] { run(request); })));
  }

  void run(const Request& request) {
    try {
      take_part(
          engine,
          [&] {
            const Job& job = whole ? *whole : model->job;
            job.check_pointers(request.in, "in");
            job.check_pointers({request.out.data(), request.out.size()}, "out");
            check_floats(job, request.in_sizes, "in");
            check_floats(job, request.out_sizes, "out");
            check_state();
            const auto timing = timer.encode();
            model->begin(request.step,
                         {.loss_scale = request.loss_scale, .rate = request.rate, .exact = levels && levels->plain()});
            bucket->follow(model->epochs);
            bucket->begin(model->context());
            if (factors) factors->begin(request.in, request.out);
          },
          [&](std::exception_ptr failure) {
            const auto timing = timer.wait();
            agree_step(engine, agreed_now(), request.step, request.loss_scale, failure);
          },
          [&] {
            if (levels) return run_levels(request);
            if (factors) return run_factors(request);
            move(request);
            finish(request.out, true);
          });
    } catch (...) {
      model->abandon();
      throw;
    }
  }

  // A state of other nodes has residuals of other pieces.
  void check_state() const {
    const StateNodes then = nodes_of(model->feedback.extras()), now = levels ? levels->state_nodes() : StateNodes{};
    if (then == now) return;
    const bool moved = then.nodes == now.nodes && then.per_node == now.per_node;
    throw Error(
        ErrorKind::usage,
        moved ? fmt::format("the state is of position {}, and this rank has position {}", then.position, now.position)
              : fmt::format("the state is of {}, and this reducer has {}; ErrorFeedback::redistribute() makes "
                            "states for other nodes",
                            then.str(), now.str()),
        "nodes");
  }

  void run_levels(const Request& request) {
    ModelCore& m = *model;
    NodeExchange& exchange = levels->exchange;
    exchange.scatter(request.in);
    Request pieces{.step = request.step, .in_sizes = {}, .out_sizes = {}};
    pieces.in.assign(exchange.pieces().begin(), exchange.pieces().end());
    pieces.out = exchange.pieces();
    move(pieces);
    // A rank sees its own pieces only, and all ranks must decide alike.
    if (exchange.gather(request.out, !manual && keeps_state())) return take(request.step);
    m.finite.fail();
    m.abandon();
  }

  void run_factors(const Request& request) {
    Request wired{.step = request.step, .in_sizes = {}, .out_sizes = {}};
    for (const size_t i : others) {
      wired.in.push_back(request.in[i]);
      wired.out.push_back(request.out[i]);
    }
    wired.in.resize(model->job.tensors.size());
    wired.out.resize(model->job.tensors.size());
    if (!others.empty()) move(wired);
    factors->run([&](BucketTransfer& one, std::span<const void* const> in, std::span<void* const> out) {
      one.up(request.step, in, up_outputs(one, out));
      if (model->has_down()) one.down(request.step, {}, out);
    });
    finish(wired.out, factors->finite());
  }

  // The same on all ranks, though some may have no piece of any tensor with a residual.
  bool keeps_state() const {
    const auto any = [](const std::vector<bool>& flags) {
      return std::find(flags.begin(), flags.end(), true) != flags.end();
    };
    const Job& job = model->job;
    return !model->stateless() || any(job.up_feedback) || (model->has_down() && any(job.down_feedback));
  }

  void move(const Request& request) {
    ModelCore& m = *model;
    Learning *const up = m.learning(Direction::up), *const down = m.learning(Direction::down);
    if (up && up->ahead()) {
      bucket->observe_up(request.step, request.in, *up);
      learn_ahead(Direction::up);
    }
    bucket->up(request.step, request.in, up_outputs(*bucket, request.out), up);
    if (!m.has_down()) return;
    if (down && down->ahead()) {
      bucket->observe_down(request.step, *down);
      learn_ahead(Direction::down);
    }
    bucket->down(request.step, {}, request.out, down);
  }

  // Where decode_up puts the results: with scatter nowhere, they come with the messages of the owners.
  std::vector<void*> up_outputs(BucketTransfer& one, std::span<void* const> out) {
    if (model->has_down()) return {};
    return locate(model->job, one.core().up_shards(), out);
  }

  // All ranks see the same results, so all decide alike. Learning is collective and may fail, so it comes before the
  // residuals change. `known`: results that are not of the bucket are finite.
  void finish(std::span<void* const> out, bool known) {
    ModelCore& m = *model;
    if (!manual && !m.stateless()) {
      const auto timing = timer.decode();
      const BucketCore& core = bucket->core();
      if (!known) m.finite.fail();
      m.finite.check(m.job.device(), m.has_down() ? core.down_results(out) : core.up_results(up_outputs(*bucket, out)));
      if (m.finite.bad()) return m.abandon();
    }
    take(*m.step);
  }

  void take(uint64_t step) {
    ModelCore& m = *model;
    if (!m.how.exact && !(manual && together())) learn(m.learnings, step, false);
    if (factors) factors->save();
    if (manual) return m.leave_open();
    m.commit();
  }

  void learn_ahead(Direction direction) {
    learn({model->learning(direction)}, *model->step, true);
    const auto timing = timer.encode();
    model->choose(direction);
    bucket->follow(model->epochs);
  }

  void learn(const Learnings& learnings, uint64_t step, bool ahead) {
    const size_t bytes = stats_bytes(learnings, step, ahead);
    if (bytes == 0) return;
    const auto world = static_cast<size_t>(engine.size());
    std::vector<std::byte> mine(bytes), all(bytes * world);
    take_stats(learnings, step, ahead, mine);
    {
      const auto timing = timer.wait();
      if (levels) {
        levels->all_gather(mine, all);
      } else {
        std::vector<Bytes> ranks;
        for (size_t p = 0; p < world; ++p) ranks.push_back(std::span(all).subspan(p * bytes, bytes));
        engine.all_gather(mine, ranks).wait();
      }
    }
    const auto timing = timer.encode();
    gradwire::learn(learnings, step, ahead, all, engine.size());
  }

  bool together() const { return !model->job.options.model.empty(); }

  // Ranks that have learned different things must not exchange data.
  uint64_t agreed_now() const {
    uint64_t h = agreed;
    for (const auto* codecs : {&model->job.up, &model->job.down})
      for (const Codec& codec : *codecs)
        for (uint32_t word : codec.table()) h = mix64(h ^ word);
    return factors ? mix64(h ^ factors->hash()) : h;
  }

  void expect_manual(const char* what) const {
    if (!manual)
      throw Error(
          ErrorKind::usage,
          fmt::format("{}: this reducer commits a step by itself if its results are finite; ReduceOptions::commit "
                      "= manual leaves it to the caller",
                      what),
          "commit");
  }

  Engine& engine;
  std::shared_ptr<CommandQueue> queue;
  ReduceTimer timer;
  std::optional<Job> whole;         // on two levels and with factors: of the caller's tensors
  std::optional<TwoLevels> levels;  // where there are two
  std::optional<ModelCore> model;
  std::optional<FactorExchange> factors;  // where matrices travel as factors
  std::vector<size_t> others;             // with factors: the caller's tensors that the bucket carries
  std::string rules;                      // with lowrank: what the caller said
  std::optional<BucketTransfer> bucket;
  bool manual = false;
  double rate = -1;
  uint64_t agreed = 0;
};

Reducer::Reducer(Engine& engine, std::vector<NamedTensor> tensors, const ReduceOptions& options)
    : state_(std::make_unique<State>(engine, options.device)) {
  State& state = *state_;
  const auto failure_of = [](const std::function<void()>& body) -> std::exception_ptr {
    try {
      body();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  };
  Handshake handshake;
  const std::exception_ptr failure = failure_of([&] {
    const std::string nodes = checked_nodes_option(options.nodes, engine);
    if (options.nodes == 0)
      state.build(tensors, options);
    else
      state.join(tensors, options);
    handshake = (options.nodes == 0 ? state.model->job : *state.whole).handshake();
    for (HandshakeField& field : handshake.common)
      if (!state.rules.empty() && field.name == std::string_view("up")) field.text = state.rules;
    handshake.common.push_back({"nodes", nodes});
    handshake.node = engine.node();
  });
  std::vector<int> found;
  state.queue->submit([&] { found = agree(engine, handshake, failure); })->wait();
  state.agreed = handshake.hash();
  if (options.nodes == 0) return;
  // All ranks know the same of their nodes, so what is refused here is refused on all.
  NodeLayout layout(options.nodes, engine.rank(), found);
  const std::exception_ptr late = failure_of([&] { state.build(tensors, options, std::move(layout)); });
  state.queue->submit([&] { agree(engine, {}, late); })->wait();
}

Reducer::~Reducer() { state_->queue->finish(); }

Handle Reducer::start(uint64_t step, std::span<const void* const> in, std::span<void* const> out, float loss_scale) {
  return state_->submit({step, {in.begin(), in.end()}, {out.begin(), out.end()}, loss_scale, state_->rate, {}, {}});
}

void Reducer::run(uint64_t step, std::span<const void* const> in, std::span<void* const> out, float loss_scale) {
  start(step, in, out, loss_scale).wait();
}

Handle Reducer::start(uint64_t step, FloatInputs in, FloatOutputs out, float loss_scale) {
  State* const state = state_.get();
  Request request{.step = step, .loss_scale = loss_scale, .rate = state->rate, .in_sizes = {}, .out_sizes = {}};
  request.in_sizes.emplace();
  request.out_sizes.emplace();
  for (const auto& one : in) {
    request.in.push_back(one.data());
    request.in_sizes->push_back(one.size());
  }
  for (const auto& one : out) {
    request.out.push_back(one.data());
    request.out_sizes->push_back(one.size());
  }
  return state->submit(std::move(request));
}

void Reducer::run(uint64_t step, FloatInputs in, FloatOutputs out, float loss_scale) {
  start(step, in, out, loss_scale).wait();
}

void Reducer::run(uint64_t step, std::span<const float> in, std::span<float> out, float loss_scale) {
  start(step, FloatInputs(&in, 1), FloatOutputs(&out, 1), loss_scale).wait();
}

void Reducer::learn_together(std::span<Reducer* const> reducers, uint64_t step) {
  if (reducers.empty()) return;
  Learnings all;
  for (const Reducer* reducer : reducers) {
    if (!reducer->state_->together())
      throw Error(ErrorKind::usage, "a reducer was not told the tensors of the model that it belongs to", "model");
    for (Learning* one : reducer->state_->model->learnings) all.push_back(one);
  }
  State& first = *reducers.front()->state_;
  if (first.levels && first.levels->plain()) return;
  first.queue
      ->submit([&] {
        first.learn(all, step, false);
        for (const Reducer* reducer : reducers) reducer->state_->model->save_learned();
      })
      ->wait();
}

void Reducer::commit(uint64_t step) {
  state_->expect_manual("commit");
  state_->queue->finish();
  state_->model->feedback.commit(step);
}

void Reducer::rollback(uint64_t step) {
  state_->expect_manual("rollback");
  state_->queue->finish();
  state_->model->roll_back(step);
}

uint64_t Reducer::skipped() const {
  state_->queue->finish();
  return state_->model->finite.skipped();
}

void Reducer::set_rate(double rate) { state_->rate = rate; }

std::vector<Codec> Reducer::codecs(Direction direction) const {
  state_->queue->finish();
  const std::vector<Codec>& all = direction == Direction::up ? state_->model->job.up : state_->model->job.down;
  if (!state_->factors) return all;
  std::vector<Codec> codecs(state_->whole->tensors.size());
  for (size_t k = 0; k < state_->others.size(); ++k) codecs[state_->others[k]] = all[k];
  for (const FactoredMatrix& one : state_->factors->plan().matrices) codecs[one.tensor] = all[one.p];
  return codecs;
}

std::vector<uint64_t> Reducer::encoded_bytes(Direction direction) const {
  const std::vector<Codec> used = codecs(direction);
  std::vector<uint64_t> bytes;
  const Job& job = state_->whole ? *state_->whole : state_->model->job;
  for (size_t i = 0; i < used.size(); ++i) bytes.push_back(used[i].bytes(job.tensors[i].count));
  if (!state_->factors) return bytes;
  const std::vector<FactoredMatrix>& matrices = state_->factors->plan().matrices;
  for (size_t k = 0; k < matrices.size(); ++k) bytes[matrices[k].tensor] = state_->factors->encoded_bytes(k);
  return bytes;
}

ErrorFeedback& Reducer::feedback() { return state_->model->feedback; }

int Reducer::position() const { return state_->levels ? state_->levels->layout.position() : state_->engine.rank(); }

uint64_t Reducer::message_bytes() const {
  return state_->bucket->bytes_sent() + agree_step_bytes(state_->engine.size()) +
         (state_->levels ? state_->levels->exchange.bytes_sent() : 0) +
         (state_->factors ? state_->factors->bytes_sent() : 0);
}

uint64_t Reducer::node_bytes() const {
  if (!state_->levels) return message_bytes();
  return state_->bucket->bytes_sent() + agree_step_bytes(state_->levels->others() + 1);
}

ReduceTimes Reducer::times() const {
  state_->queue->finish();
  return state_->timer.times();
}

ReduceMemory Reducer::memory() const {
  state_->queue->finish();
  const NodeExchange* inside = state_->levels ? &state_->levels->exchange : nullptr;
  return {.residuals = state_->model->feedback.bytes(),
          .messages = state_->bucket->message_memory() + (inside ? inside->memory() : 0) +
                      (state_->factors ? state_->factors->message_memory() : 0),
          .sums = state_->bucket->core().sum_memory() + (inside ? inside->sum_memory() : 0) +
                  (state_->factors ? state_->factors->sum_memory() : 0)};
}

}  // namespace gradwire
