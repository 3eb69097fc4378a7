// SPDX-License-Identifier: Apache-2.0
#include "collective/stages.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "device/sums.h"

namespace gradwire {
namespace {

enum Stage : uint32_t { kUp = 0, kDown = 1 };

Stamp stamp_of(const Engine& engine, const Job& job, uint64_t step, Stage stage, size_t rank) {
  return {.seed = job.options.seed,
          .step = step,
          .stage = stage,
          .rank = static_cast<uint32_t>(rank),
          .world = static_cast<uint32_t>(engine.size())};
}

// Where the shards lie, given where their tensors do.
template <class Pointer>
std::vector<Pointer> locate(const Job& job, std::span<const Shard> shards, std::span<const Pointer> tensors) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte, std::byte>;
  std::vector<Pointer> at;
  for (const Shard& shard : shards)
    at.push_back(static_cast<Byte*>(tensors[shard.tensor]) + shard.first * bytes_of(job.tensors[shard.tensor].dtype));
  return at;
}

std::vector<std::vector<Shard>> by_owner(const Job& job, int world) {
  const std::vector<Shard> all = shards(job.tensors, world);
  std::vector<std::vector<Shard>> lists;
  for (int owner = 0; owner < world; ++owner) lists.push_back(Job::of_owner(all, owner));
  return lists;
}

// What a coder shows to those who learn.
Coder::Look look_at(Learning* learning, std::span<const Shard> shards, uint64_t step, bool ahead) {
  if (!learning || learning->empty()) return {};
  return [=](Runner& runner, std::span<const void* const> tensors, const Residuals* residuals, ConstBytes message) {
    learning->look(runner, shards, step, tensors, residuals, message, ahead);
  };
}

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

std::vector<SumSpan> spans_of(std::span<const Shard> shards, std::span<float* const> sums) {
  std::vector<SumSpan> spans;
  for (size_t i = 0; i < shards.size(); ++i) spans.push_back({sums[i], shards[i].count});
  return spans;
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

Coder::Coder(std::vector<TensorSpec> specs, const Device& device)
    : device_(device), plan_(std::move(specs)), runner_(make_runner(plan_, device)) {}

void Coder::recode(std::vector<TensorSpec> specs) {
  runner_.reset();
  plan_ = Plan(std::move(specs));
  runner_ = make_runner(plan_, device_);
}

void Coder::begin(ErrorFeedback* feedback, Side side, uint64_t step, float loss_scale) {
  residuals_.reset();
  if (feedback) residuals_ = feedback->begin(side, step, plan_.tensors(), loss_scale);
}

void Coder::encode(std::span<const void* const> shards, const Stamp& stamp, Bytes message, Staging& staging, const Look& look, bool again) {
  const Residuals* residuals = residuals_ ? &residuals_->residuals : nullptr;
  const Bytes at = staging.writable(message);
  runner_->encode(shards, stamp, at, residuals);
  if (look) look(*runner_, shards, residuals, at);
  if (again) return;
  staging.written(message);
  residuals_.reset();
}

void Coder::decode(ConstBytes message, std::span<void* const> shards, Write write, const Stamp& expected, Staging& staging) {
  runner_->decode(staging.readable(message), shards, write, &expected);
}

void Coder::merge(std::span<const ConstBytes> messages, std::span<float* const> means) { decode_merged(plan_, messages, means); }

UpStage::UpStage(Engine& engine, const Job& job, Owners owners, Clock& clock)
    : engine_(engine), job_(job), clock_(clock), owners_(owners), staging_(job.memory) {
  const auto me = static_cast<size_t>(engine.rank());
  if (owners == Owners::shards)
    shards_ = by_owner(job, engine.size());
  else
    shards_.push_back(job.whole());
  mine_ = owners == Owners::shards ? shards_[me] : shards_[0];
  for (const std::vector<Shard>& list : shards_)
    writers_.push_back(std::make_unique<Coder>(job.specs(list, Side::up, false), job.device()));
  reader_ = std::make_unique<Coder>(job.specs(mine_, Side::up, true), job.device());
  make_room();
}

// Messages have the size that the codecs of the step give.
void UpStage::make_room() {
  const auto world = static_cast<size_t>(engine_.size()), me = static_cast<size_t>(engine_.rank());
  std::vector<size_t> written, read(world, reader_->message_bytes());
  for (const auto& writer : writers_) written.push_back(writer->message_bytes());
  size_t largest = reader_->message_bytes();
  for (size_t bytes : written) largest = std::max(largest, bytes);
  if (owners_ == Owners::shards) {
    read[me] = 0;
    make_blocks(sent_, job_, written);
  }
  make_blocks(received_, job_, read);
  staging_.resize(largest);
}

void UpStage::recode() {
  for (size_t m = 0; m < writers_.size(); ++m) writers_[m]->recode(job_.specs(shards_[m], Side::up, false));
  reader_->recode(job_.specs(mine_, Side::up, true));
  make_room();
}

void UpStage::begin(const StepContext& context) {
  if (context.feedback) job_.add_residuals(*context.feedback, job_.whole(), Side::up);
  for (auto& writer : writers_) writer->begin(context.feedback, Side::up, context.step, context.loss_scale);
}

void UpStage::encode(uint64_t step, std::span<const void* const> in, Learning* learning, bool ahead) {
  const auto spell = clock_.encode();
  const auto me = static_cast<size_t>(engine_.rank());
  const std::vector<Bytes> written = owners_ == Owners::shards ? views(sent_) : std::vector{received_[me].bytes()};
  for (size_t m = 0; m < writers_.size(); ++m)
    writers_[m]->encode(locate(job_, shards_[m], in), stamp_of(engine_, job_, step, kUp, me), written[m], staging_,
                        look_at(learning, shards_[m], step, ahead), ahead);
  staging_.wait();
}

void UpStage::look_ahead(uint64_t step, std::span<const void* const> in, Learning& learning) { encode(step, in, &learning, true); }

void UpStage::run(uint64_t step, std::span<const void* const> in, std::span<float* const> sums, Learning* learning) {
  const auto me = static_cast<size_t>(engine_.rank());
  const std::vector<Bytes> recv = views(received_);
  const std::vector<Bytes> written = owners_ == Owners::shards ? views(sent_) : std::vector{recv[me]};
  encode(step, in, learning, false);

  std::vector<ConstBytes> messages(recv.begin(), recv.end());
  {
    const auto spell = clock_.wait();
    if (owners_ == Owners::shards) {
      std::vector<ConstBytes> send(written.begin(), written.end());
      messages[me] = std::exchange(send[me], {});  // one's own need not travel
      engine_.all_to_all(send, recv).wait();
    } else {
      engine_.all_gather(written[0], recv).wait();
    }
  }
  const auto spell = clock_.decode();
  if (owners_ == Owners::everybody && reader_->merges()) return merge(messages, sums);
  const std::vector<void*> to(sums.begin(), sums.end());
  for (size_t p = 0; p < messages.size(); ++p)
    reader_->decode(messages[p], to, p == 0 ? Write::set : Write::add, stamp_of(engine_, job_, step, kUp, p), staging_);
  reader_->wait();
}

// Tables are merged on the host, wherever the sums are wanted.
void UpStage::merge(std::span<const ConstBytes> messages, std::span<float* const> sums) {
  std::vector<float*> to(sums.begin(), sums.end());
  const bool here = job_.memory->on_host();
  if (!here) {
    uint64_t floats = 0;
    for (const Shard& shard : mine_) floats += shard.count;
    if (!merged_) merged_ = std::make_unique<Block>(job_.memory, Block::Place::host, floats * sizeof(float));
    float* at = merged_->floats();
    for (size_t i = 0; i < to.size(); at += mine_[i++].count) to[i] = at;
  }
  reader_->merge(messages, to);
  const auto world = static_cast<float>(engine_.size());
  for (size_t i = 0; i < to.size(); ++i) {
    for (float* x = to[i]; x < to[i] + mine_[i].count; ++x) *x *= world;  // what is asked for here is the sum
    if (!here) job_.memory->start_from_host(sums[i], to[i], mine_[i].count * sizeof(float));
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

DownStage::DownStage(Engine& engine, const Job& job, Clock& clock)
    : engine_(engine), job_(job), clock_(clock), shards_(by_owner(job, engine.size())), staging_(job.memory) {
  for (const std::vector<Shard>& list : shards_)
    readers_.push_back(std::make_unique<Coder>(job.specs(list, Side::down, false), job.device()));
  writer_ = std::make_unique<Coder>(job.specs(mine(), Side::down, true), job.device());
  make_room();
}

void DownStage::make_room() {
  std::vector<size_t> sizes;
  size_t largest = 0;
  for (const auto& reader : readers_) {
    sizes.push_back(reader->message_bytes());
    largest = std::max(largest, sizes.back());
  }
  make_blocks(received_, job_, sizes);
  staging_.resize(largest);
}

void DownStage::recode() {
  for (size_t p = 0; p < readers_.size(); ++p) readers_[p]->recode(job_.specs(shards_[p], Side::down, false));
  writer_->recode(job_.specs(mine(), Side::down, true));
  make_room();
}

void DownStage::begin(const StepContext& context) {
  if (context.feedback) job_.add_residuals(*context.feedback, mine(), Side::down);
  // Residuals are kept in units of the mean, so that they mean the same in a world of another size; where the sum is
  // sent, what is encoded is `world` times that, which is a scale like the loss's.
  const float scale = job_.options.op == ReduceOptions::Op::sum ? static_cast<float>(engine_.size()) : 1.0f;
  writer_->begin(context.feedback, Side::down, context.step, context.loss_scale * scale);
}

void DownStage::encode(uint64_t step, std::span<const float* const> values, Learning* learning, bool ahead) {
  const auto spell = clock_.encode();
  const auto me = static_cast<size_t>(engine_.rank());
  writer_->encode(std::vector<const void*>(values.begin(), values.end()), stamp_of(engine_, job_, step, kDown, me), received_[me].bytes(),
                  staging_, look_at(learning, mine(), step, ahead), ahead);
  staging_.wait();
}

void DownStage::look_ahead(uint64_t step, std::span<const float* const> values, Learning& learning) { encode(step, values, &learning, true); }

void DownStage::run(uint64_t step, std::span<const float* const> values, std::span<void* const> out, Learning* learning) {
  const auto me = static_cast<size_t>(engine_.rank());
  encode(step, values, learning, false);
  {
    const auto spell = clock_.wait();
    engine_.all_gather(received_[me].bytes(), views(received_)).wait();
  }
  const auto spell = clock_.decode();
  for (size_t p = 0; p < readers_.size(); ++p)
    readers_[p]->decode(received_[p].bytes(), locate(job_, shards_[p], out), Write::set,
                        stamp_of(engine_, job_, step, kDown, p), staging_);
  settle_outputs(job_, out);
  staging_.wait();
  for (auto& reader : readers_) reader->wait();
}

uint64_t DownStage::bytes_sent() const { return writer_->message_bytes() * static_cast<uint64_t>(engine_.size() - 1); }

uint64_t DownStage::message_memory() const { return held(received_) + staging_.held(); }

RootStage::RootStage(Engine& engine, const Job& job, int root, Clock& clock)
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
  coder_.begin(context.feedback, Side::down, context.step, context.loss_scale);
}

void RootStage::run(uint64_t step, std::span<void* const> data) {
  const std::vector<void*> at = locate(job_, shards_, data);
  const Stamp stamp = stamp_of(engine_, job_, step, kDown, static_cast<size_t>(root_));
  if (engine_.rank() == root_) {
    const auto spell = clock_.encode();
    coder_.encode(std::vector<const void*>(at.begin(), at.end()), stamp, message_.bytes(), staging_);
    staging_.wait();
  }
  {
    const auto spell = clock_.wait();
    engine_.broadcast(message_.bytes(), root_).wait();
  }
  const auto spell = clock_.decode();
  coder_.decode(message_.bytes(), at, Write::set, stamp, staging_);
  settle_outputs(job_, data);
  coder_.wait();
}

void finish_sums(const Job& job, int world, std::span<const Shard> shards, std::span<float* const> sums) {
  const bool mean = job.options.op == ReduceOptions::Op::mean;
  divide(job.device(), spans_of(shards, sums), mean ? static_cast<float>(world) : 1.0f);
}

}  // namespace gradwire
