// SPDX-License-Identifier: Apache-2.0
#include "collective/coding.h"

#include <set>
#include <type_traits>
#include <utility>

namespace gradwire {
namespace {

template <class Pointer>
std::vector<Pointer> located(const Job& job, std::span<const Shard> shards, std::span<const Pointer> tensors) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte, std::byte>;
  std::vector<Pointer> at;
  for (const Shard& shard : shards)
    at.push_back(static_cast<Byte*>(tensors[shard.tensor]) + shard.first * bytes_of(job.tensors[shard.tensor].dtype));
  return at;
}

// What a coder shows to those who learn.
Coder::Look look_at(Learning* learning, std::span<const Shard> shards, uint64_t step, bool ahead) {
  if (!learning || learning->empty()) return {};
  return [=](Runner& runner, std::span<const void* const> tensors, const Residuals* residuals, ConstBytes message) {
    learning->look(runner, shards, step, tensors, residuals, message, ahead);
  };
}

}  // namespace

Coder::Coder(std::vector<TensorSpec> specs, const Device& device)
    : device_(device), plan_(std::move(specs)), runner_(make_runner(plan_, device)) {}

void Coder::recode(std::vector<TensorSpec> specs) {
  runner_.reset();
  plan_ = Plan(std::move(specs));
  runner_ = make_runner(plan_, device_);
}

void Coder::begin(const StepContext& context, Side side, float scale, std::span<const Shard> shards) {
  residuals_.reset();
  if (!context.feedback) return;
  if (context.idle.empty()) {
    residuals_ = context.feedback->begin(side, context.step, plan_.tensors(), scale);
    return;
  }
  std::vector<TensorSpec> specs = plan_.tensors();
  for (size_t i = 0; i < specs.size(); ++i)
    if (context.idle[shards[i].tensor]) specs[i].count = 0;  // of which there is no residual
  residuals_ = context.feedback->begin(side, context.step, specs, scale);
}

void Coder::encode(std::span<const void* const> shards, const Stamp& stamp, Bytes message, Staging& staging,
                   const Look& look, bool again) {
  const Residuals* residuals = residuals_ ? &residuals_->residuals : nullptr;
  const Bytes at = staging.writable(message);
  runner_->encode(shards, stamp, at, residuals);
  if (look) look(*runner_, shards, residuals, at);
  if (again) return;
  staging.written(message);
  residuals_.reset();
}

void Coder::decode(ConstBytes message, std::span<void* const> shards, Write write, const Stamp& expected,
                   Staging& staging) {
  runner_->decode(staging.readable(message), shards, write, &expected);
}

void Coder::merge(std::span<const ConstBytes> messages, std::span<float* const> means) {
  decode_merged(plan_, messages, means);
}

Stamp stamp_of(const Job& job, Seat seat, uint64_t step, Stage stage, size_t rank) {
  return {.seed = job.options.seed,
          .step = step,
          .stage = stage,
          .rank = static_cast<uint32_t>(rank),
          .world = static_cast<uint32_t>(seat.world)};
}

std::vector<const void*> locate(const Job& job, std::span<const Shard> shards, std::span<const void* const> tensors) {
  return located(job, shards, tensors);
}
std::vector<void*> locate(const Job& job, std::span<const Shard> shards, std::span<void* const> tensors) {
  return located(job, shards, tensors);
}

ShardLists by_owner(const Job& job, int world) {
  const std::vector<Shard> all = shards(job.tensors, world);
  ShardLists lists;
  for (int owner = 0; owner < world; ++owner) lists.push_back(Job::of_owner(all, owner));
  return lists;
}

UpCoding::UpCoding(const Job& job, Seat seat, const Device& device, ShardLists lists)
    : job_(job), seat_(seat), lists_(std::move(lists)) {
  std::set<size_t> tensors;
  for (const std::vector<Shard>& list : lists_) {
    for (const Shard& shard : list) tensors.insert(shard.tensor);
    writers_.push_back(std::make_unique<Coder>(job.specs(list, Side::up, false), device));
  }
  for (size_t tensor : tensors) whole_.push_back({tensor, 0, job.tensors[tensor].count, 0});
  reader_ = std::make_unique<Coder>(job.specs(mine(), Side::up, true), device);
}

void UpCoding::recode() {
  for (size_t m = 0; m < writers_.size(); ++m) writers_[m]->recode(job_.specs(lists_[m], Side::up, false));
  reader_->recode(job_.specs(mine(), Side::up, true));
}

void UpCoding::begin(const StepContext& context) {
  if (context.feedback) job_.add_residuals(*context.feedback, whole_, Side::up);
  for (size_t m = 0; m < writers_.size(); ++m) writers_[m]->begin(context, Side::up, context.loss_scale, lists_[m]);
}

void UpCoding::encode(uint64_t step, std::span<const void* const> in, std::span<const Bytes> to, Staging& staging,
                      Learning* learning, bool ahead) {
  const Stamp stamp = stamp_of(job_, seat_, step, kUp, static_cast<size_t>(seat_.rank));
  for (size_t m = 0; m < writers_.size(); ++m)
    writers_[m]->encode(locate(job_, lists_[m], in), stamp, to[m], staging, look_at(learning, lists_[m], step, ahead),
                        ahead);
}

void UpCoding::decode(uint64_t step, std::span<const ConstBytes> messages, std::span<float* const> sums,
                      Staging& staging) {
  const std::vector<void*> to(sums.begin(), sums.end());
  for (size_t p = 0; p < messages.size(); ++p)
    reader_->decode(messages[p], to, p == 0 ? Write::set : Write::add, stamp_of(job_, seat_, step, kUp, p), staging);
}

void UpCoding::decode_own(uint64_t step, std::span<const ConstBytes> messages, std::span<void* const> out,
                          Staging& staging) {
  const Stamp stamp = stamp_of(job_, seat_, step, kUp, static_cast<size_t>(seat_.rank));
  for (size_t m = 0; m < writers_.size(); ++m)
    writers_[m]->decode(messages[m], locate(job_, lists_[m], out), Write::set, stamp, staging);
}

std::vector<size_t> UpCoding::written() const {
  std::vector<size_t> bytes;
  for (const auto& writer : writers_) bytes.push_back(writer->message_bytes());
  return bytes;
}

DownCoding::DownCoding(const Job& job, Seat seat, const Device& device, ShardLists lists, bool as_f32)
    : job_(job), seat_(seat), lists_(std::move(lists)), as_f32_(as_f32) {
  for (const std::vector<Shard>& list : lists_)
    readers_.push_back(std::make_unique<Coder>(job.specs(list, Side::down, false), device));
  writer_ = std::make_unique<Coder>(job.specs(mine(), Side::down, as_f32_), device);
}

void DownCoding::recode() {
  for (size_t p = 0; p < readers_.size(); ++p) readers_[p]->recode(job_.specs(lists_[p], Side::down, false));
  writer_->recode(job_.specs(mine(), Side::down, as_f32_));
}

void DownCoding::begin(const StepContext& context) {
  if (context.feedback) job_.add_residuals(*context.feedback, mine(), Side::down);
  // Residuals are kept in units of the mean, so that they mean the same in a world of another size; where the sum is
  // sent, what is encoded is `world` times that, which is a scale like the loss's.
  const float scale = job_.options.op == ReduceOptions::Op::sum ? static_cast<float>(seat_.world) : 1.0f;
  writer_->begin(context, Side::down, context.loss_scale * scale, mine());
}

void DownCoding::encode(uint64_t step, std::span<const void* const> values, Bytes to, Staging& staging,
                        Learning* learning, bool ahead) {
  writer_->encode(values, stamp_of(job_, seat_, step, kDown, static_cast<size_t>(seat_.rank)), to, staging,
                  look_at(learning, mine(), step, ahead), ahead);
}

void DownCoding::decode(uint64_t step, std::span<const ConstBytes> messages, std::span<void* const> out,
                        Staging& staging) {
  for (size_t p = 0; p < readers_.size(); ++p)
    readers_[p]->decode(messages[p], locate(job_, lists_[p], out), Write::set, stamp_of(job_, seat_, step, kDown, p),
                        staging);
}

std::vector<size_t> DownCoding::read() const {
  std::vector<size_t> bytes;
  for (const auto& reader : readers_) bytes.push_back(reader->message_bytes());
  return bytes;
}

void DownCoding::wait() {
  for (auto& reader : readers_) reader->wait();
}

void DownCoding::poll() {
  for (auto& reader : readers_) reader->poll();
}

}  // namespace gradwire
