// SPDX-License-Identifier: Apache-2.0
// The all-reduce over an engine: the coding core (ModelCore, and one bucket of all tensors), an engine that moves the
// messages, and a CommandQueue that runs the steps in order. A step that fails is rolled back here, so that it changes
// no residual.
#include <fmt/format.h>

#include <numeric>
#include <optional>
#include <utility>

#include "collective/bucket_transfer.h"
#include "collective/command_queue.h"
#include "collective/model_core.h"
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

}  // namespace

struct Reducer::State {
  State(Engine& e, const Device& device) : engine(e), queue(CommandQueue::of(e)), timer(device) {}

  void build(std::vector<NamedTensor> tensors, const ReduceOptions& options) {
    model.emplace(std::move(tensors), CoderOptions{.reduce = options, .rank = engine.rank(), .world = engine.size()});
    std::vector<size_t> all(model->job.tensors.size());
    std::iota(all.begin(), all.end(), size_t{0});
    bucket.emplace(engine, model->job, model->bucket(all), timer);
    manual = options.commit == ReduceOptions::Commit::manual;
    for (const Learning* one : model->learnings)
      if (together() && one->ahead())
        throw Error(ErrorKind::usage,
                    "a codec looks at a step before it is sent, which takes the whole model in one reducer", "model");
  }

  Handle submit(Request request) {
    return Handle(std::make_unique<PendingStep>(queue->submit([this, request = std::move(request)] { run(request); })));
  }

  void run(const Request& request) {
    try {
      take_part(
          engine,
          [&] {
            model->job.check_pointers(request.in, "in");
            model->job.check_pointers({request.out.data(), request.out.size()}, "out");
            check_floats(model->job, request.in_sizes, "in");
            check_floats(model->job, request.out_sizes, "out");
            const auto timing = timer.encode();
            model->begin(request.step, {.loss_scale = request.loss_scale, .rate = request.rate});
            bucket->follow(model->epochs);
            bucket->begin(model->context());
          },
          [&](std::exception_ptr failure) {
            const auto timing = timer.wait();
            agree_step(engine, agreed_now(), request.step, request.loss_scale, failure);
          },
          [&] {
            move(request);
            finish(request);
          });
    } catch (...) {
      model->abandon();
      throw;
    }
  }

  void move(const Request& request) {
    ModelCore& m = *model;
    Learning *const up = m.learning(Direction::up), *const down = m.learning(Direction::down);
    if (up && up->ahead()) {
      bucket->observe_up(request.step, request.in, *up);
      learn_ahead(Direction::up);
    }
    bucket->up(request.step, request.in, up_outputs(request), up);
    if (!m.has_down()) return;
    if (down && down->ahead()) {
      bucket->observe_down(request.step, *down);
      learn_ahead(Direction::down);
    }
    bucket->down(request.step, {}, request.out, down);
  }

  // Where decode_up puts the results: with scatter nowhere, they come with the messages of the owners.
  std::vector<void*> up_outputs(const Request& request) {
    if (model->has_down()) return {};
    return locate(model->job, bucket->core().up_shards(), std::span<void* const>(request.out));
  }

  // All ranks see the same results, so all decide alike. Learning is collective and may fail, so it comes before the
  // residuals change.
  void finish(const Request& request) {
    ModelCore& m = *model;
    if (manual) {
      if (!together()) learn(m.learnings, request.step, false);
      return m.leave_open();
    }
    if (!m.stateless()) {
      const auto timing = timer.decode();
      const BucketCore& core = bucket->core();
      m.finite.check(m.job.device(),
                     m.has_down() ? core.down_results(request.out) : core.up_results(up_outputs(request)));
      if (m.finite.bad()) return m.abandon();
    }
    learn(m.learnings, request.step, false);
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
    const auto world = static_cast<size_t>(engine.size()), me = static_cast<size_t>(engine.rank());
    std::vector<std::byte> all(bytes * world);
    std::vector<Bytes> ranks;
    for (size_t p = 0; p < world; ++p) ranks.push_back(std::span(all).subspan(p * bytes, bytes));
    take_stats(learnings, step, ahead, ranks[me]);
    {
      const auto timing = timer.wait();
      engine.all_gather(ranks[me], ranks).wait();
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
    return h;
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
  std::optional<ModelCore> model;
  std::optional<BucketTransfer> bucket;
  bool manual = false;
  double rate = -1;
  uint64_t agreed = 0;
};

Reducer::Reducer(Engine& engine, std::vector<NamedTensor> tensors, const ReduceOptions& options)
    : state_(std::make_unique<State>(engine, options.device)) {
  State& state = *state_;
  std::exception_ptr failure;
  Handshake handshake;
  try {
    state.build(std::move(tensors), options);
    handshake = state.model->job.handshake();
  } catch (...) {
    failure = std::current_exception();
  }
  state.queue->submit([&] { agree(engine, handshake, failure); })->wait();
  state.agreed = handshake.hash();
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
  return direction == Direction::up ? state_->model->job.up : state_->model->job.down;
}

ErrorFeedback& Reducer::feedback() { return state_->model->feedback; }

uint64_t Reducer::message_bytes() const {
  return state_->bucket->bytes_sent() + agree_step_bytes(state_->engine.size());
}

ReduceTimes Reducer::times() const {
  state_->queue->finish();
  return state_->timer.times();
}

ReduceMemory Reducer::memory() const {
  state_->queue->finish();
  return {.residuals = state_->model->feedback.bytes(),
          .messages = state_->bucket->message_memory(),
          .sums = state_->bucket->core().sum_memory()};
}

}  // namespace gradwire
