// SPDX-License-Identifier: Apache-2.0
#include "collective/stages.h"

#include <new>
#include <type_traits>
#include <utility>

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

}  // namespace

Block::Block(size_t bytes)
    : data_(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{64}))), size_(bytes) {}
void Block::Free::operator()(std::byte* data) const { ::operator delete (data, std::align_val_t{64}); }

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

void Coder::encode(std::span<const void* const> shards, const Stamp& stamp, Bytes message, const Look& look, bool again) {
  const Residuals* residuals = residuals_ ? &residuals_->residuals : nullptr;
  runner_->encode(shards, stamp, message, residuals);
  runner_->wait();
  if (look) look(*runner_, shards, residuals, message);
  if (!again) residuals_.reset();
}

void Coder::decode(ConstBytes message, std::span<void* const> shards, Write write, const Stamp& expected) {
  runner_->decode(message, shards, write, &expected);
  runner_->wait();
}

void Coder::merge(std::span<const ConstBytes> messages, std::span<float* const> means) { decode_merged(plan_, messages, means); }

UpStage::UpStage(Engine& engine, const Job& job, Owners owners) : engine_(engine), job_(job), owners_(owners) {
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
  sent_.clear();
  received_.clear();
  if (owners_ == Owners::shards)
    for (const auto& writer : writers_) sent_.emplace_back(writer->message_bytes());
  for (size_t p = 0; p < world; ++p)
    received_.emplace_back(owners_ == Owners::shards && p == me ? 0 : reader_->message_bytes());
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
  const auto me = static_cast<size_t>(engine_.rank());
  const std::vector<Bytes> written = owners_ == Owners::shards ? views(sent_) : std::vector{received_[me].bytes()};
  for (size_t m = 0; m < writers_.size(); ++m)
    writers_[m]->encode(locate(job_, shards_[m], in), stamp_of(engine_, job_, step, kUp, me), written[m],
                        look_at(learning, shards_[m], step, ahead), ahead);
}

void UpStage::look_ahead(uint64_t step, std::span<const void* const> in, Learning& learning) { encode(step, in, &learning, true); }

void UpStage::run(uint64_t step, std::span<const void* const> in, std::span<float* const> sums, Learning* learning) {
  const auto me = static_cast<size_t>(engine_.rank());
  const std::vector<Bytes> recv = views(received_);
  const std::vector<Bytes> written = owners_ == Owners::shards ? views(sent_) : std::vector{recv[me]};
  encode(step, in, learning, false);

  std::vector<ConstBytes> messages(recv.begin(), recv.end());
  if (owners_ == Owners::shards) {
    std::vector<ConstBytes> send(written.begin(), written.end());
    messages[me] = std::exchange(send[me], {});  // one's own need not travel
    engine_.all_to_all(send, recv).wait();
  } else {
    engine_.all_gather(written[0], recv).wait();
  }
  if (owners_ == Owners::everybody && reader_->merges()) {
    reader_->merge(messages, sums);
    const auto world = static_cast<float>(engine_.size());
    for (size_t i = 0; i < sums.size(); ++i)
      for (float* x = sums[i]; x < sums[i] + mine_[i].count; ++x) *x *= world;  // what is asked for here is the sum
    return;
  }
  const std::vector<void*> to(sums.begin(), sums.end());
  for (size_t p = 0; p < messages.size(); ++p)
    reader_->decode(messages[p], to, p == 0 ? Write::set : Write::add, stamp_of(engine_, job_, step, kUp, p));
}

uint64_t UpStage::bytes_sent() const {
  const auto world = static_cast<size_t>(engine_.size()), me = static_cast<size_t>(engine_.rank());
  if (owners_ == Owners::everybody) return received_[me].bytes().size() * (world - 1);
  uint64_t bytes = 0;
  for (size_t p = 0; p < world; ++p) bytes += p == me ? 0 : sent_[p].bytes().size();
  return bytes;
}

DownStage::DownStage(Engine& engine, const Job& job)
    : engine_(engine), job_(job), shards_(by_owner(job, engine.size())) {
  for (const std::vector<Shard>& list : shards_)
    readers_.push_back(std::make_unique<Coder>(job.specs(list, Side::down, false), job.device()));
  writer_ = std::make_unique<Coder>(job.specs(mine(), Side::down, true), job.device());
  make_room();
}

void DownStage::make_room() {
  received_.clear();
  for (const auto& reader : readers_) received_.emplace_back(reader->message_bytes());
}

void DownStage::recode() {
  for (size_t p = 0; p < readers_.size(); ++p) readers_[p]->recode(job_.specs(shards_[p], Side::down, false));
  writer_->recode(job_.specs(mine(), Side::down, true));
  make_room();
}

void DownStage::look_ahead(uint64_t step, std::span<const float* const> values, Learning& learning) {
  const auto me = static_cast<size_t>(engine_.rank());
  writer_->encode(std::vector<const void*>(values.begin(), values.end()), stamp_of(engine_, job_, step, kDown, me), received_[me].bytes(),
                  look_at(&learning, mine(), step, true), true);
}

void DownStage::begin(const StepContext& context) {
  if (context.feedback) job_.add_residuals(*context.feedback, mine(), Side::down);
  // Residuals are kept in units of the mean, so that they mean the same in a world of another size; where the sum is
  // sent, what is encoded is `world` times that, which is a scale like the loss's.
  const float scale = job_.options.op == ReduceOptions::Op::sum ? static_cast<float>(engine_.size()) : 1.0f;
  writer_->begin(context.feedback, Side::down, context.step, context.loss_scale * scale);
}

void DownStage::run(uint64_t step, std::span<const float* const> values, std::span<void* const> out, Learning* learning) {
  const auto me = static_cast<size_t>(engine_.rank());
  const std::vector<const void*> from(values.begin(), values.end());
  writer_->encode(from, stamp_of(engine_, job_, step, kDown, me), received_[me].bytes(), look_at(learning, mine(), step, false));
  engine_.all_gather(received_[me].bytes(), views(received_)).wait();
  for (size_t p = 0; p < readers_.size(); ++p)
    readers_[p]->decode(received_[p].bytes(), locate(job_, shards_[p], out), Write::set,
                        stamp_of(engine_, job_, step, kDown, p));
}

uint64_t DownStage::bytes_sent() const { return writer_->message_bytes() * static_cast<uint64_t>(engine_.size() - 1); }

RootStage::RootStage(Engine& engine, const Job& job, int root)
    : engine_(engine),
      job_(job),
      root_(root),
      shards_(job.whole(root)),
      coder_(job.specs(shards_, Side::down, false), job.device()),
      message_(coder_.message_bytes()) {}

void RootStage::begin(const StepContext& context) {
  if (engine_.rank() != root_) return;
  if (context.feedback) job_.add_residuals(*context.feedback, shards_, Side::down);
  coder_.begin(context.feedback, Side::down, context.step, context.loss_scale);
}

void RootStage::run(uint64_t step, std::span<void* const> data) {
  const std::vector<void*> at = locate(job_, shards_, data);
  const Stamp stamp = stamp_of(engine_, job_, step, kDown, static_cast<size_t>(root_));
  if (engine_.rank() == root_) coder_.encode(std::vector<const void*>(at.begin(), at.end()), stamp, message_.bytes());
  engine_.broadcast(message_.bytes(), root_).wait();
  coder_.decode(message_.bytes(), at, Write::set, stamp);
}

void finish_sums(const Job& job, int world, std::span<const Shard> shards, std::span<float* const> sums) {
  if (job.options.op == ReduceOptions::Op::sum) return;
  const auto divisor = static_cast<float>(world);
  for (size_t i = 0; i < shards.size(); ++i)
    for (float* x = sums[i]; x < sums[i] + shards[i].count; ++x) *x /= divisor;
}

}  // namespace gradwire
