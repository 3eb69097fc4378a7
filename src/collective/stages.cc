// SPDX-License-Identifier: Apache-2.0
#include "collective/stages.h"

#include <algorithm>
#include <utility>

#include "device/sums.h"

namespace gradwire {
namespace {

Seat seat_of(const Engine& engine) { return {engine.rank(), engine.size()}; }

std::vector<Bytes> views(std::span<const Block> blocks) {
  std::vector<Bytes> all;
  for (const Block& block : blocks) all.push_back(block.bytes());
  return all;
}

// Blocks of these sizes, kept where they are large enough.
void make_blocks(std::vector<Block>& blocks, const Job& job, std::span<const size_t> sizes) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i < blocks.size())
      blocks[i].resize(sizes[i]);
    else
      blocks.emplace_back(job.memory, Block::Place::host, sizes[i]);
  }
}

uint64_t held(std::span<const Block> blocks) {
  uint64_t bytes = 0;
  for (const Block& block : blocks) bytes += block.held();
  return bytes;
}

// What was decoded into f32 tensors has the bits of a CPU's result, not-a-numbers too.
void settle_outputs(const Job& job, std::span<void* const> out) {
  if (job.memory->on_host()) return;
  std::vector<SumSpan> spans;
  for (size_t i = 0; i < job.tensors.size(); ++i)
    if (job.tensors[i].dtype == DType::f32) spans.push_back({static_cast<float*>(out[i]), job.tensors[i].count});
  settle_nans(job.device(), spans);
}

}  // namespace

UpStage::UpStage(Engine& engine, const Job& job, Owners owners, ReduceTimer& clock)
    : engine_(engine),
      job_(job),
      clock_(clock),
      owners_(owners),
      coding_(job, seat_of(engine), job.device(),
              owners == Owners::shards ? by_owner(job, engine.size()) : ShardLists{job.whole()}),
      staging_(job.memory) {
  make_room();
}

// Messages have the size that the codecs of the step give.
void UpStage::make_room() {
  const auto world = static_cast<size_t>(engine_.size()), me = static_cast<size_t>(engine_.rank());
  const std::vector<size_t> written = coding_.written();
  std::vector<size_t> read(world, coding_.read());
  size_t largest = coding_.read();
  for (size_t bytes : written) largest = std::max(largest, bytes);
  if (owners_ == Owners::shards) {
    read[me] = 0;
    make_blocks(sent_, job_, written);
  }
  make_blocks(received_, job_, read);
  staging_.resize(largest);
}

void UpStage::recode() {
  coding_.recode();
  make_room();
}

std::vector<Bytes> UpStage::to_write() const {
  if (owners_ == Owners::shards) return views(sent_);
  return {received_[static_cast<size_t>(engine_.rank())].bytes()};
}

void UpStage::encode(uint64_t step, std::span<const void* const> in, Learning* learning, bool ahead) {
  const auto timer = clock_.encode();
  coding_.encode(step, in, to_write(), staging_, learning, ahead);
  staging_.wait();
}

void UpStage::look_ahead(uint64_t step, std::span<const void* const> in, Learning& learning) {
  encode(step, in, &learning, true);
}

void UpStage::run(uint64_t step, std::span<const void* const> in, std::span<float* const> sums, Learning* learning) {
  const auto me = static_cast<size_t>(engine_.rank());
  const std::vector<Bytes> recv = views(received_), written = to_write();
  encode(step, in, learning, false);

  std::vector<ConstBytes> messages(recv.begin(), recv.end());
  {
    const auto timer = clock_.wait();
    if (owners_ == Owners::shards) {
      std::vector<ConstBytes> send(written.begin(), written.end());
      messages[me] = std::exchange(send[me], {});  // one's own need not travel
      engine_.all_to_all(send, recv).wait();
    } else {
      engine_.all_gather(written[0], recv).wait();
    }
  }
  const auto timer = clock_.decode();
  if (owners_ == Owners::everybody && coding_.merges()) return merge(messages, sums);
  coding_.decode(step, messages, sums, staging_);
  coding_.wait();
}

// Tables are merged on the host, wherever the sums are wanted.
void UpStage::merge(std::span<const ConstBytes> messages, std::span<float* const> sums) {
  std::vector<float*> to(sums.begin(), sums.end());
  const bool here = job_.memory->on_host();
  if (!here) {
    uint64_t floats = 0;
    for (const Shard& shard : mine()) floats += shard.count;
    if (!merged_) merged_ = std::make_unique<Block>(job_.memory, Block::Place::host, floats * sizeof(float));
    float* at = merged_->floats();
    for (size_t i = 0; i < to.size(); at += mine()[i++].count) to[i] = at;
  }
  coding_.merge(messages, to);
  const auto world = static_cast<float>(engine_.size());
  for (size_t i = 0; i < to.size(); ++i) {
    for (float* x = to[i]; x < to[i] + mine()[i].count; ++x) *x *= world;  // what is asked for here is the sum
    if (!here) job_.memory->start_from_host(sums[i], to[i], mine()[i].count * sizeof(float));
  }
  staging_.wait();
}

uint64_t UpStage::bytes_sent() const {
  const auto world = static_cast<size_t>(engine_.size()), me = static_cast<size_t>(engine_.rank());
  if (owners_ == Owners::everybody) return received_[me].bytes().size() * (world - 1);
  uint64_t bytes = 0;
  for (size_t p = 0; p < world; ++p) bytes += p == me ? 0 : sent_[p].bytes().size();
  return bytes;
}

uint64_t UpStage::message_memory() const { return held(sent_) + held(received_) + staging_.held(); }

DownStage::DownStage(Engine& engine, const Job& job, ReduceTimer& clock)
    : engine_(engine),
      job_(job),
      clock_(clock),
      coding_(job, seat_of(engine), job.device(), by_owner(job, engine.size())),
      staging_(job.memory) {
  make_room();
}

void DownStage::make_room() {
  const std::vector<size_t> sizes = coding_.read();
  make_blocks(received_, job_, sizes);
  staging_.resize(*std::max_element(sizes.begin(), sizes.end()));
}

void DownStage::recode() {
  coding_.recode();
  make_room();
}

void DownStage::encode(uint64_t step, std::span<const float* const> values, Learning* learning, bool ahead) {
  const auto timer = clock_.encode();
  coding_.encode(step, std::vector<const void*>(values.begin(), values.end()),
                 received_[static_cast<size_t>(engine_.rank())].bytes(), staging_, learning, ahead);
  staging_.wait();
}

void DownStage::look_ahead(uint64_t step, std::span<const float* const> values, Learning& learning) {
  encode(step, values, &learning, true);
}

void DownStage::run(uint64_t step, std::span<const float* const> values, std::span<void* const> out,
                    Learning* learning) {
  const auto me = static_cast<size_t>(engine_.rank());
  encode(step, values, learning, false);
  const std::vector<Bytes> recv = views(received_);
  {
    const auto timer = clock_.wait();
    engine_.all_gather(recv[me], recv).wait();
  }
  const auto timer = clock_.decode();
  coding_.decode(step, std::vector<ConstBytes>(recv.begin(), recv.end()), out, staging_);
  settle_outputs(job_, out);
  staging_.wait();
  coding_.wait();
}

uint64_t DownStage::bytes_sent() const {
  return received_[static_cast<size_t>(engine_.rank())].bytes().size() * static_cast<uint64_t>(engine_.size() - 1);
}

uint64_t DownStage::message_memory() const { return held(received_) + staging_.held(); }

RootStage::RootStage(Engine& engine, const Job& job, int root, ReduceTimer& clock)
    : engine_(engine),
      job_(job),
      clock_(clock),
      root_(root),
      shards_(job.whole(root)),
      coder_(job.specs(shards_, Side::down, false), job.device()),
      message_(job.memory, Block::Place::host, coder_.message_bytes()),
      staging_(job.memory) {
  staging_.resize(coder_.message_bytes());
}

void RootStage::begin(const StepContext& context) {
  if (engine_.rank() != root_) return;
  if (context.feedback) job_.add_residuals(*context.feedback, shards_, Side::down);
  coder_.begin(context, Side::down, context.loss_scale, shards_);
}

void RootStage::run(uint64_t step, std::span<void* const> data) {
  const std::vector<void*> at = locate(job_, shards_, data);
  const Stamp stamp = stamp_of(job_, seat_of(engine_), step, kDown, static_cast<size_t>(root_));
  if (engine_.rank() == root_) {
    const auto timer = clock_.encode();
    coder_.encode(std::vector<const void*>(at.begin(), at.end()), stamp, message_.bytes(), staging_);
    staging_.wait();
  }
  {
    const auto timer = clock_.wait();
    engine_.broadcast(message_.bytes(), root_).wait();
  }
  const auto timer = clock_.decode();
  coder_.decode(message_.bytes(), at, Write::set, stamp, staging_);
  settle_outputs(job_, data);
  coder_.wait();
}

}  // namespace gradwire
