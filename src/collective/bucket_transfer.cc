// SPDX-License-Identifier: Apache-2.0
#include "collective/bucket_transfer.h"

#include <utility>

#include "device/sums.h"

namespace gradwire {
namespace {

std::vector<Bytes> views(std::span<const Buffer> buffers) {
  std::vector<Bytes> all;
  for (const Buffer& buffer : buffers) all.push_back(buffer.bytes());
  return all;
}

void resize_all(std::vector<Buffer>& buffers, const Job& job, std::span<const size_t> sizes) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i < buffers.size())
      buffers[i].resize(sizes[i]);
    else
      buffers.emplace_back(job.memory, Buffer::Place::host, sizes[i]);
  }
}

}  // namespace

void settle_outputs(const Job& job, std::span<void* const> out) {
  if (job.memory->on_host()) return;
  std::vector<SumSpan> spans;
  for (size_t i = 0; i < job.tensors.size(); ++i)
    if (job.tensors[i].dtype == DType::f32) spans.push_back({static_cast<float*>(out[i]), job.tensors[i].count});
  settle_nans(job.device(), spans);
}

BucketTransfer::BucketTransfer(Engine& engine, const Job& job, BucketPlan plan, ReduceTimer& timer)
    : engine_(engine),
      job_(job),
      timer_(timer),
      core_(job, {engine.rank(), engine.size()}, job.device(), std::move(plan), Messages::on_host) {
  resize();
}

void BucketTransfer::follow(const std::array<uint64_t, 2>& epochs) {
  if (core_.follow(epochs)) resize();
}

// The sizes of messages follow from the codecs of the step.
void BucketTransfer::resize() {
  if (core_.has_up()) {
    std::vector<size_t> received(static_cast<size_t>(engine_.size()), core_.up_received());
    if (!core_.gathers()) {
      resize_all(up_sent_, job_, core_.up_sent());
      received[rank()] = 0;
    }
    resize_all(up_received_, job_, received);
  }
  if (core_.has_down()) resize_all(down_received_, job_, core_.down_bytes());
}

std::vector<Bytes> BucketTransfer::up_messages() const {
  return core_.gathers() ? std::vector<Bytes>{up_received_[rank()].bytes()} : views(up_sent_);
}

void BucketTransfer::encode_up(uint64_t step, std::span<const void* const> in, Learning* learning, bool ahead) {
  const auto timer = timer_.encode();
  core_.encode_up(step, in, up_messages(), learning, ahead);
  core_.wait_for_copies();
}

void BucketTransfer::encode_down(uint64_t step, std::span<const void* const> values, Learning* learning, bool ahead) {
  const auto timer = timer_.encode();
  core_.encode_down(step, down_received_[rank()].bytes(), values, learning, ahead);
  core_.wait_for_copies();
}

void BucketTransfer::observe_up(uint64_t step, std::span<const void* const> in, Learning& learning) {
  encode_up(step, in, &learning, true);
}

void BucketTransfer::observe_down(uint64_t step, Learning& learning) { encode_down(step, {}, &learning, true); }

void BucketTransfer::up(uint64_t step, std::span<const void* const> in, std::span<void* const> out,
                        Learning* learning) {
  encode_up(step, in, learning, false);
  const std::vector<Bytes> written = up_messages(), received = views(up_received_);
  std::vector<ConstBytes> messages(received.begin(), received.end());
  {
    const auto timer = timer_.wait();
    if (core_.gathers()) {
      engine_.all_gather(written[0], received).wait();
    } else {
      std::vector<ConstBytes> send(written.begin(), written.end());
      messages[rank()] = std::exchange(send[rank()], {});
      engine_.all_to_all(send, received).wait();
    }
  }
  const auto timer = timer_.decode();
  core_.decode_up(step, messages, out);
  core_.wait(Direction::up);
}

void BucketTransfer::down(uint64_t step, std::span<const void* const> values, std::span<void* const> out,
                          Learning* learning) {
  encode_down(step, values, learning, false);
  const std::vector<Bytes> received = views(down_received_);
  {
    const auto timer = timer_.wait();
    engine_.all_gather(received[rank()], received).wait();
  }
  const auto timer = timer_.decode();
  core_.decode_down(step, std::vector<ConstBytes>(received.begin(), received.end()), out);
  settle_outputs(job_, out);
  core_.wait(Direction::down);
}

void BucketTransfer::decode_own(uint64_t step, std::span<void* const> out) {
  const std::vector<Bytes> written = up_messages();
  core_.decode_own(step, std::vector<ConstBytes>(written.begin(), written.end()), out);
}

uint64_t BucketTransfer::bytes_sent() const {
  const auto others = static_cast<uint64_t>(engine_.size() - 1);
  uint64_t bytes = 0;
  if (core_.has_up() && core_.gathers()) bytes += up_received_[rank()].bytes().size() * others;
  for (size_t p = 0; p < up_sent_.size(); ++p) bytes += p == rank() ? 0 : up_sent_[p].bytes().size();
  if (core_.has_down()) bytes += down_received_[rank()].bytes().size() * others;
  return bytes;
}

uint64_t BucketTransfer::message_memory() const {
  uint64_t bytes = core_.staging_memory();
  for (const auto* buffers : {&up_sent_, &up_received_, &down_received_})
    for (const Buffer& buffer : *buffers) bytes += buffer.held();
  return bytes;
}

}  // namespace gradwire
