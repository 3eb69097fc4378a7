// SPDX-License-Identifier: Apache-2.0
// Collectives of one call: all_reduce, and the two directions of it by themselves, reduce_scatter and all_gather, and
// broadcast. Nothing is kept between calls, so each builds its plans and exchanges the whole handshake, the step
// included.
#include <fmt/format.h>

#include <memory>
#include <optional>

#include "collective/bucket_transfer.h"
#include "collective/command_queue.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

// This rank's shards lie back to back in one buffer.
template <class Pointer, class Float>
std::vector<Pointer> cut(std::span<const Shard> shards, std::span<Float> buffer, const char* what) {
  uint64_t elements = 0;
  for (const Shard& shard : shards) elements += shard.count;
  if (buffer.size() != elements)
    throw Error(ErrorKind::usage,
                fmt::format("{} has {} elements; this rank's shards have {}", what, buffer.size(), elements), what);
  std::vector<Pointer> at;
  for (const Shard& shard : shards) {
    at.push_back(buffer.data());
    buffer = buffer.subspan(shard.count);
  }
  return at;
}

// prepare() makes the job and takes the residuals, move() moves the data.
template <class Prepare, class Move>
void run_once(Engine& engine, uint64_t step, const std::optional<Job>& job, const std::string& root,
              const Prepare& prepare, const Move& move) {
  run_in_order(engine, [&] {
    take_part(
        engine, prepare,
        [&](std::exception_ptr failure) {
          Handshake handshake;
          if (!failure) {
            handshake = job->handshake();
            handshake.common.push_back({"step", std::to_string(step)});
            handshake.common.push_back({"root", root});
          }
          agree(engine, handshake, failure);
        },
        move);
  });
}

}  // namespace

void all_reduce(Engine& engine, std::span<float> data, const ReduceOptions& options, uint64_t step) {
  if (options.feedback == ReduceOptions::Feedback::on || options.commit == ReduceOptions::Commit::manual)
    throw Error(
        ErrorKind::usage,
        "all_reduce() keeps nothing between calls, so it has no residuals to feed back or to decide on; a Reducer "
        "has",
        options.feedback == ReduceOptions::Feedback::on ? "feedback" : "commit");
  ReduceOptions own = options;
  own.feedback = own.owner_feedback = ReduceOptions::Feedback::off;
  Reducer reducer(engine, {{"data", data.size()}}, own);
  reducer.run(step, data, data);
}

void all_reduce(Engine& engine, std::span<float> data, const std::string& codec, uint64_t step) {
  all_reduce(engine, data, ReduceOptions{.up = codec}, step);
}

void reduce_scatter(Engine& engine, std::span<const NamedTensor> tensors, const ReduceOptions& options, uint64_t step,
                    std::span<const void* const> in, std::span<float> out, ErrorFeedback* feedback) {
  ReduceTimer timer(options.device);
  std::optional<Job> job;
  std::optional<BucketTransfer> bucket;
  std::vector<void*> sums;
  run_once(
      engine, step, job, "-",
      [&] {
        job.emplace("reduce_scatter", tensors, options);
        job->check_pointers(in, "in");
        BucketPlan plan{.up = by_owner(shards(tensors, engine.size()), engine.size()), .sums = ShardSums::Use::floats};
        bucket.emplace(engine, *job, std::move(plan), timer);
        sums = cut<void*>(bucket->core().up_shards(), out, "out");
        bucket->begin({step, feedback, 1.0f, options.decay});
      },
      [&] { bucket->up(step, in, sums); });
}

void all_gather(Engine& engine, std::span<const NamedTensor> tensors, const ReduceOptions& options, uint64_t step,
                std::span<const float> mine, std::span<void* const> out, ErrorFeedback* feedback) {
  ReduceTimer timer(options.device);
  std::optional<Job> job;
  std::optional<BucketTransfer> bucket;
  std::vector<const void*> values;
  run_once(
      engine, step, job, "-",
      [&] {
        job.emplace("all_gather", tensors, options);
        job->check_pointers({out.data(), out.size()}, "out");
        bucket.emplace(engine, *job, BucketPlan{.down = by_owner(shards(tensors, engine.size()), engine.size())},
                       timer);
        values = cut<const void*>(bucket->core().down_shards(), mine, "mine");
        bucket->begin({step, feedback, 1.0f, options.decay});
      },
      [&] { bucket->down(step, values, out); });
}

void broadcast(Engine& engine, std::span<const NamedTensor> tensors, const ReduceOptions& options, uint64_t step,
               int root, std::span<void* const> tensors_data, ErrorFeedback* feedback) {
  std::optional<Job> job;
  std::vector<Shard> whole;
  std::unique_ptr<MessageCoder> coder;
  std::optional<Buffer> message;
  std::optional<HostStaging> staging;  // last: it waits before the message is released
  run_once(
      engine, step, job, std::to_string(root),
      [&] {
        if (root < 0 || root >= engine.size())
          throw Error(ErrorKind::usage, fmt::format("root is {}; allowed are 0 to {}", root, engine.size() - 1),
                      "root");
        job.emplace("broadcast", tensors, options);
        job->check_pointers({tensors_data.data(), tensors_data.size()}, "tensors_data");
        whole = job->whole(root);
        coder = std::make_unique<MessageCoder>(job->specs(whole, Direction::down, false), job->device());
        message.emplace(job->memory, Buffer::Place::host, coder->message_bytes());
        staging.emplace(job->memory, Messages::on_host);
        staging->resize(coder->message_bytes());
        if (engine.rank() != root) return;
        if (feedback) job->add_residuals(*feedback, whole, Direction::down);
        coder->begin({step, feedback, 1.0f, options.decay}, Direction::down, 1.0f, whole);
      },
      [&] {
        const std::vector<void*> at = locate(*job, whole, tensors_data);
        const Stamp stamp =
            stamp_of(*job, {engine.rank(), engine.size()}, step, Direction::down, static_cast<size_t>(root));
        if (engine.rank() == root) {
          coder->encode(std::vector<const void*>(at.begin(), at.end()), stamp, message->bytes(), *staging);
          staging->wait();
        }
        engine.broadcast(message->bytes(), root).wait();
        coder->decode(message->bytes(), at, Write::set, stamp, *staging);
        settle_outputs(*job, tensors_data);
        coder->wait();
      });
}

}  // namespace gradwire
