// SPDX-License-Identifier: Apache-2.0
// The stages by themselves, one call each: reduce_scatter is an UpStage, all_gather a DownStage, broadcast a RootStage.
// Nothing is kept between calls, so each builds its plans and exchanges the whole signature, the step included. The
// caller owns the residuals and decides on the step; after an error the step must be rolled back.
#include <fmt/format.h>

#include <memory>

#include "collective/issuer.h"
#include "collective/stages.h"
#include "collective/sums.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

// This rank's shards lie back to back in one buffer.
template <class Float>
std::vector<Float*> cut(std::span<const Shard> shards, std::span<Float> buffer, const char* what) {
  uint64_t elements = 0;
  for (const Shard& shard : shards) elements += shard.count;
  if (buffer.size() != elements)
    throw Error(ErrorKind::usage,
                fmt::format("{} has {} elements; this rank's shards have {}", what, buffer.size(), elements), what);
  std::vector<Float*> at;
  for (const Shard& shard : shards) {
    at.push_back(buffer.data());
    buffer = buffer.subspan(shard.count);
  }
  return at;
}

// prepare() makes the job and the stage and begins it, move() runs it.
template <class Prepare, class Move>
void once(Engine& engine, uint64_t step, const std::unique_ptr<Job>& job, const std::string& extra, Prepare&& prepare,
          Move&& move) {
  issue(engine, [&] {
    take_part(
        engine, prepare,
        [&](std::exception_ptr failure) {
          Terms terms;
          if (!failure) {
            terms = job->terms();
            terms.common.push_back({"step", std::to_string(step)});
            terms.common.push_back({"root", extra});
          }
          agree(engine, terms, failure);
        },
        move);
  });
}

}  // namespace

void reduce_scatter(Engine& engine, std::span<const NamedTensor> tensors, const ReduceOptions& options, uint64_t step,
                    std::span<const void* const> in, std::span<float> out, ErrorFeedback* feedback) {
  ReduceTimer clock(options.device);
  std::unique_ptr<Job> job;
  std::unique_ptr<UpStage> stage;
  std::vector<float*> sums;
  once(
      engine, step, job, "-",
      [&] {
        job = std::make_unique<Job>("reduce_scatter", tensors, options);
        job->check_pointers(in, "in");
        stage = std::make_unique<UpStage>(engine, *job, UpStage::Owners::shards, clock);
        sums = cut(stage->mine(), out, "out");
        stage->begin({step, feedback, 1.0f});
      },
      [&] {
        stage->run(step, in, sums);
        finish_sums(*job, job->device(), engine.size(), stage->mine(), sums);
        job->memory->wait();
      });
}

void all_gather(Engine& engine, std::span<const NamedTensor> tensors, const ReduceOptions& options, uint64_t step,
                std::span<const float> mine, std::span<void* const> out, ErrorFeedback* feedback) {
  ReduceTimer clock(options.device);
  std::unique_ptr<Job> job;
  std::unique_ptr<DownStage> stage;
  std::vector<const float*> values;
  once(
      engine, step, job, "-",
      [&] {
        job = std::make_unique<Job>("all_gather", tensors, options);
        job->check_pointers({out.data(), out.size()}, "out");
        stage = std::make_unique<DownStage>(engine, *job, clock);
        values = cut(stage->mine(), mine, "mine");
        stage->begin({step, feedback, 1.0f});
      },
      [&] { stage->run(step, values, out); });
}

void broadcast(Engine& engine, std::span<const NamedTensor> tensors, const ReduceOptions& options, uint64_t step,
               int root, std::span<void* const> tensors_data, ErrorFeedback* feedback) {
  ReduceTimer clock(options.device);
  std::unique_ptr<Job> job;
  std::unique_ptr<RootStage> stage;
  once(
      engine, step, job, std::to_string(root),
      [&] {
        if (root < 0 || root >= engine.size())
          throw Error(ErrorKind::usage, fmt::format("root is {}; allowed are 0 to {}", root, engine.size() - 1),
                      "root");
        job = std::make_unique<Job>("broadcast", tensors, options);
        job->check_pointers({tensors_data.data(), tensors_data.size()}, "tensors_data");
        stage = std::make_unique<RootStage>(engine, *job, root, clock);
        stage->begin({step, feedback, 1.0f});
      },
      [&] { stage->run(step, tensors_data); });
}

}  // namespace gradwire
