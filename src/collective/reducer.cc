// SPDX-License-Identifier: Apache-2.0
// The all-reduce. `gather` is an UpStage with everybody as the owner of everything; `scatter` is an UpStage and a
// DownStage. A step that fails is rolled back here, so that it changes no residual.
#include <algorithm>
#include <utility>

#include "collective/issuer.h"
#include "collective/stages.h"
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
};

void narrow(const float* from, void* to, uint64_t count, DType dtype) {
  std::transform(from, from + count, static_cast<uint16_t*>(to), dtype == DType::f16 ? f32_to_f16 : f32_to_bf16);
}

}  // namespace

struct Reducer::State {
  explicit State(Engine& e) : engine(e), issuer(Issuer::of(e)) {}

  Engine& engine;
  std::shared_ptr<Issuer> issuer;
  std::unique_ptr<Job> job;
  std::unique_ptr<UpStage> up;
  std::unique_ptr<DownStage> down;  // scatter
  ErrorFeedback feedback;
  uint64_t terms = 0;
  std::unique_ptr<Block> scratch;  // f32 sums that cannot stand in the outputs
  std::vector<float*> in_scratch;  // per shard of up->mine(); null: summed in the output itself

  // `gather` sums f32 tensors where they are wanted; whatever else is summed is read again in another form.
  bool summed_in_output(const Shard& shard) const { return !down && job->tensors[shard.tensor].dtype == DType::f32; }

  void build(std::span<const NamedTensor> tensors, const ReduceOptions& options) {
    const bool scatter = options.method == ReduceOptions::Method::scatter;
    job = std::make_unique<Job>(scatter ? "scatter" : "gather", tensors, options);
    feedback = ErrorFeedback(options.residual);
    up = std::make_unique<UpStage>(engine, *job, scatter ? UpStage::Owners::shards : UpStage::Owners::everybody);
    job->add_residuals(feedback, job->whole(), Side::up);
    if (scatter) {
      down = std::make_unique<DownStage>(engine, *job);
      job->add_residuals(feedback, down->mine(), Side::down);
    }
    uint64_t floats = 0;
    std::vector<uint64_t> offsets;
    for (const Shard& shard : up->mine()) {
      offsets.push_back(floats);
      if (!summed_in_output(shard)) floats += (shard.count + 15) / 16 * 16;  // vectors like whole cache lines
    }
    scratch = std::make_unique<Block>(floats * sizeof(float));
    for (size_t i = 0; i < offsets.size(); ++i)
      in_scratch.push_back(summed_in_output(up->mine()[i]) ? nullptr : scratch->floats() + offsets[i]);
  }

  void run(const Request& request) {
    bool begun = false;
    try {
      take_part(
          engine,
          [&] {
            job->check_pointers(request.in, "in");
            job->check_pointers({request.out.data(), request.out.size()}, "out");
            const StepContext context{request.step, &feedback, request.loss_scale};
            up->begin(context);
            begun = true;
            if (down) down->begin(context);
          },
          [&](std::exception_ptr failure) { agree_step(engine, terms, request.step, request.loss_scale, failure); },
          [&] { move(request); });
    } catch (...) {
      if (begun) feedback.rollback(request.step);
      throw;
    }
  }

  void move(const Request& request) {
    std::vector<float*> sums = in_scratch;
    for (size_t i = 0; i < sums.size(); ++i)
      if (!sums[i]) sums[i] = static_cast<float*>(request.out[up->mine()[i].tensor]);
    up->run(request.step, request.in, sums);
    finish_sums(*job, engine.size(), up->mine(), sums);
    if (down) return down->run(request.step, std::vector<const float*>(sums.begin(), sums.end()), request.out);
    for (size_t i = 0; i < sums.size(); ++i) {
      const Shard& shard = up->mine()[i];
      if (in_scratch[i]) narrow(sums[i], request.out[shard.tensor], shard.count, job->tensors[shard.tensor].dtype);
    }
  }
};

Reducer::Reducer(Engine& engine, std::vector<NamedTensor> tensors, const ReduceOptions& options)
    : state_(std::make_unique<State>(engine)) {
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
  Request request{step, {in.begin(), in.end()}, {out.begin(), out.end()}, loss_scale};
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
}

ErrorFeedback& Reducer::feedback() { return state_->feedback; }

uint64_t Reducer::message_bytes() const {
  const State& state = *state_;
  return state.up->bytes_sent() + (state.down ? state.down->bytes_sent() : 0) + agree_step_bytes(state.engine.size());
}

}  // namespace gradwire
