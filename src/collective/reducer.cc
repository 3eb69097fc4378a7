// SPDX-License-Identifier: Apache-2.0
// The all-reduce. `gather` is an UpStage with everybody as the owner of everything; `scatter` is an UpStage and a
// DownStage. A step that fails is rolled back here, so that it changes no residual.
#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "collective/issuer.h"
#include "collective/stages.h"
#include "collective/sums.h"
#include "core/bits.h"

namespace gradwire {
namespace {

struct Pending final : Handle::State {
  explicit Pending(std::shared_ptr<Issuer::Ticket> t) : ticket(std::move(t)) {}
  void wait() override { ticket->wait(); }
  std::shared_ptr<Issuer::Ticket> ticket;
};

struct Request {
  uint64_t step;
  std::vector<const void*> in;
  std::vector<void*> out;
  float loss_scale;
  double rate;
};

}  // namespace

struct Reducer::State {
  State(Engine& e, const Device& device) : engine(e), issuer(Issuer::of(e)), clock(device) {}

  Engine& engine;
  std::shared_ptr<Issuer> issuer;
  ReduceTimer clock;
  std::unique_ptr<Job> job;
  std::unique_ptr<UpStage> up;
  std::unique_ptr<DownStage> down;  // scatter
  ErrorFeedback feedback;
  std::unique_ptr<Learning> up_learning, down_learning;
  std::map<std::string, std::vector<std::byte>> kept;  // the notes that this reducer wrote last
  std::map<std::string, std::vector<std::byte>> undo;  // ... and those before the step that may still be rolled back
  std::optional<uint64_t> undo_step;
  double rate = 0;
  uint64_t terms = 0;
  std::unique_ptr<Sums> sums;

  void build(std::span<const NamedTensor> tensors, const ReduceOptions& options) {
    const bool scatter = options.method == ReduceOptions::Method::scatter;
    job = std::make_unique<Job>(scatter ? "scatter" : "gather", tensors, options);
    feedback = ErrorFeedback(options.residual, options.device);
    up = std::make_unique<UpStage>(engine, *job, scatter ? UpStage::Owners::shards : UpStage::Owners::everybody, clock);
    job->add_residuals(feedback, job->whole(), Side::up);
    if (scatter) {
      down = std::make_unique<DownStage>(engine, *job, clock);
      job->add_residuals(feedback, down->mine(), Side::down);
    }
    up_learning = std::make_unique<Learning>(*job, Side::up, engine.size());
    down_learning = std::make_unique<Learning>(*job, Side::down, engine.size());
    keep();
    sums = std::make_unique<Sums>(job->memory, *job, up->mine(), !scatter);
  }

  // The codecs of a step; what was learned may have been restored with the residuals since the last one.
  void recode(const Request& request) {
    if (feedback.notes() != kept) {
      up_learning->restore(feedback);
      down_learning->restore(feedback);
      kept = feedback.notes();
    }
    recode_up(request);
    recode_down(request);
  }
  void recode_up(const Request& request) {
    std::vector<Codec> codecs = up_learning->codecs(request.step, request.rate);
    if (codecs == job->up) return;
    job->up = std::move(codecs);
    up->recode();
  }
  void recode_down(const Request& request) {
    if (!down) return;
    std::vector<Codec> codecs = down_learning->codecs(request.step, request.rate);
    if (codecs == job->down) return;
    job->down = std::move(codecs);
    down->recode();
  }
  void learn(uint64_t step) {
    up_learning->learn(engine, step, false, clock);
    if (down) down_learning->learn(engine, step, false, clock);
    keep();
  }
  void keep() {
    up_learning->keep(feedback);
    if (down) down_learning->keep(feedback);
    kept = feedback.notes();
  }
  // A step that is rolled back has taught nothing.
  void unlearn(uint64_t step) {
    if (undo_step != step) return;
    for (const auto& [name, bytes] : undo) feedback.set_note(name, bytes);
    up_learning->restore(feedback);
    down_learning->restore(feedback);
    kept = feedback.notes();
    undo_step.reset();
  }
  // Ranks that learned different things must not exchange data.
  uint64_t agreed_terms() const {
    uint64_t h = terms;
    for (const auto* codecs : {&job->up, &job->down})
      for (const Codec& codec : *codecs)
        for (uint32_t word : codec.table()) h = mix64(h ^ word);
    return h;
  }

  void run(const Request& request) {
    bool begun = false;
    try {
      take_part(
          engine,
          [&] {
            job->check_pointers(request.in, "in");
            job->check_pointers({request.out.data(), request.out.size()}, "out");
            const auto timer = clock.encode();
            recode(request);
            const StepContext context{request.step, &feedback, request.loss_scale};
            up->begin(context);
            begun = true;
            if (down) down->begin(context);
          },
          [&](std::exception_ptr failure) {
            const auto timer = clock.wait();
            agree_step(engine, agreed_terms(), request.step, request.loss_scale, failure);
          },
          [&] {
            move(request);
            learn(request.step);
          });
    } catch (...) {
      if (begun) feedback.rollback(request.step);
      unlearn(request.step);
      throw;
    }
  }

  void move(const Request& request) {
    undo_step = request.step;
    undo = kept;
    std::vector<void*> outputs;
    for (const Shard& shard : up->mine()) outputs.push_back(request.out[shard.tensor]);
    const std::vector<float*> at = sums->places(outputs);
    if (up_learning->ahead()) {
      up->look_ahead(request.step, request.in, *up_learning);
      up_learning->learn(engine, request.step, true, clock);
      const auto timer = clock.encode();
      recode_up(request);
    }
    up->run(request.step, request.in, at, up_learning.get());
    finish(outputs, at);
    if (down) {
      const std::vector<const float*> values(at.begin(), at.end());
      if (down_learning->ahead()) {
        down->look_ahead(request.step, values, *down_learning);
        down_learning->learn(engine, request.step, true, clock);
        const auto timer = clock.encode();
        recode_down(request);
      }
      down->run(request.step, values, request.out, down_learning.get());
    }
  }

  // Means; where everybody has them all, in the outputs.
  void finish(std::span<void* const> outputs, std::span<float* const> at) {
    const auto timer = clock.decode();
    finish_sums(*job, job->device(), engine.size(), up->mine(), at);
    if (down) return;
    sums->round(job->device(), outputs);
    job->memory->wait();
  }
};

Reducer::Reducer(Engine& engine, std::vector<NamedTensor> tensors, const ReduceOptions& options)
    : state_(std::make_unique<State>(engine, options.device)) {
  State& state = *state_;
  std::exception_ptr failure;
  Terms terms;
  try {
    state.build(tensors, options);
    terms = state.job->terms();
  } catch (...) {
    failure = std::current_exception();
  }
  state.issuer->submit([&] { agree(engine, terms, failure); })->wait();
  state.terms = terms.hash();
}

Reducer::~Reducer() { state_->issuer->finish(); }

Handle Reducer::start(uint64_t step, std::span<const void* const> in, std::span<void* const> out, float loss_scale) {
  State* const state = state_.get();
  Request request{step, {in.begin(), in.end()}, {out.begin(), out.end()}, loss_scale, state->rate};
  return Handle(
      std::make_unique<Pending>(state->issuer->submit([state, request = std::move(request)] { state->run(request); })));
}

void Reducer::run(uint64_t step, std::span<const void* const> in, std::span<void* const> out, float loss_scale) {
  start(step, in, out, loss_scale).wait();
}

void Reducer::commit(uint64_t step) {
  state_->issuer->finish();
  state_->feedback.commit(step);
}

void Reducer::rollback(uint64_t step) {
  state_->issuer->finish();
  state_->feedback.rollback(step);
  state_->unlearn(step);
}

void Reducer::set_rate(double rate) { state_->rate = rate; }

std::vector<Codec> Reducer::codecs(Side side) const {
  state_->issuer->finish();
  return side == Side::up ? state_->job->up : state_->job->down;
}

ErrorFeedback& Reducer::feedback() { return state_->feedback; }

uint64_t Reducer::message_bytes() const {
  const State& state = *state_;
  return state.up->bytes_sent() + (state.down ? state.down->bytes_sent() : 0) + agree_step_bytes(state.engine.size());
}

ReduceTimes Reducer::times() const {
  state_->issuer->finish();
  return state_->clock.times();
}

ReduceMemory Reducer::memory() const {
  state_->issuer->finish();
  const State& state = *state_;
  return {.residuals = state.feedback.bytes(),
          .messages = state.up->message_memory() + (state.down ? state.down->message_memory() : 0),
          .sums = state.sums->held() + state.up->sum_memory()};
}

}  // namespace gradwire
