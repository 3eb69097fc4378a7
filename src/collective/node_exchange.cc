// SPDX-License-Identifier: Apache-2.0
#include "collective/node_exchange.h"

#include <cstring>

#include "core/bits.h"
#include "device/sums.h"

namespace gradwire {
namespace {

constexpr uint64_t kAligned = 16;      // pieces begin at multiples of so many bytes
constexpr uint64_t kFlagBytes = 16;    // behind a row that is gathered: whether its values are finite
constexpr uint64_t kFloatsApart = 16;  // pieces as f32 begin at multiples of so many elements: a cache line

uint64_t aligned(uint64_t number, uint64_t to) { return (number + to - 1) / to * to; }

template <class Word, class Widen>
void add_values(float* sums, const std::byte* from, uint64_t count, bool first, const Widen& widen) {
  const Word* values = reinterpret_cast<const Word*>(from);
  if (first)
    for (uint64_t i = 0; i < count; ++i) sums[i] = widen(values[i]);
  else
    for (uint64_t i = 0; i < count; ++i) sums[i] += widen(values[i]);
}

void add_values(float* sums, const std::byte* from, uint64_t count, DType dtype, bool first) {
  if (dtype == DType::f32) return add_values<float>(sums, from, count, first, [](float x) { return x; });
  if (dtype == DType::f16) return add_values<uint16_t>(sums, from, count, first, f16_to_f32);
  add_values<uint16_t>(sums, from, count, first, bf16_to_f32);
}

const Device kHost{};

}  // namespace

NodeExchange::NodeExchange(Engine& node, const Job& whole, ReduceTimer& timer)
    : node_(node),
      job_(whole),
      timer_(timer),
      rows_(whole.memory, Buffer::Place::host, 0),
      received_(whole.memory, Buffer::Place::host, 0),
      floats_(whole.memory, Buffer::Place::device, 0),
      host_floats_(whole.memory, Buffer::Place::host, 0),
      finite_(kHost) {
  uint64_t start = 0, floats = 0;
  for (int p = 0; p < node.size(); ++p) {
    NodeRow row;
    row.start = start;
    for (const NamedTensor& tensor : whole.tensors) {
      const TensorPiece piece = piece_of(tensor.name, tensor.count, p, node.size());
      row.pieces.push_back({piece.first, piece.count, row.bytes});
      row.bytes += aligned(piece.count * bytes_of(tensor.dtype), kAligned);
    }
    start += row.bytes + kFlagBytes;
    layout_.push_back(std::move(row));
  }
  for (const PieceInRow& piece : mine().pieces) {
    offsets_.push_back(floats);
    floats += aligned(piece.count, kFloatsApart);
  }
  rows_.resize(start);
  std::memset(rows_.bytes().data(), 0, start);  // what lies between pieces is sent, too
  received_.resize(mine().bytes * static_cast<uint64_t>(node.size()));
  floats_.resize(floats * sizeof(float));
  if (!whole.memory->on_host()) host_floats_.resize(floats * sizeof(float));
  for (uint64_t offset : offsets_) pieces_.push_back(floats_.floats() + offset);
}

Bytes NodeExchange::row(size_t place, uint64_t more) const {
  return rows_.bytes().subspan(layout_[place].start, layout_[place].bytes + more);
}

void NodeExchange::scatter(std::span<const void* const> in) {
  {
    const auto timing = timer_.encode();
    for (size_t p = 0; p < layout_.size(); ++p)
      for (size_t i = 0; i < in.size(); ++i) {
        const auto [first, count, at] = layout_[p].pieces[i];
        const uint64_t element = bytes_of(job_.tensors[i].dtype);
        if (count > 0)
          job_.memory->start_to_host(row(p).data() + at, static_cast<const std::byte*>(in[i]) + first * element,
                                     count * element);
      }
    job_.memory->wait();
  }
  std::vector<ConstBytes> send;
  std::vector<Bytes> received;
  for (size_t p = 0; p < layout_.size(); ++p) {
    send.push_back(p == place() ? Bytes{} : row(p));
    received.push_back(p == place() ? Bytes{} : received_.bytes().subspan(p * mine().bytes, mine().bytes));
  }
  {
    const auto timing = timer_.wait();
    node_.all_to_all(send, received).wait();
  }
  const auto timing = timer_.encode();
  for (size_t p = 0; p < layout_.size(); ++p) add_row(p == place() ? row(p).data() : received[p].data(), p == 0);
  divide_sums();
}

void NodeExchange::add_row(const std::byte* from, bool first) {
  float* const sums = job_.memory->on_host() ? floats_.floats() : host_floats_.floats();
  for (size_t i = 0; i < offsets_.size(); ++i)
    add_values(sums + offsets_[i], from + mine().pieces[i].at, mine().pieces[i].count, job_.tensors[i].dtype, first);
}

void NodeExchange::divide_sums() {
  const bool on_host = job_.memory->on_host();
  float* const sums = on_host ? floats_.floats() : host_floats_.floats();
  if (job_.options.op == ReduceOptions::Op::mean) {
    std::vector<SumSpan> spans;
    for (size_t i = 0; i < offsets_.size(); ++i) spans.push_back({sums + offsets_[i], mine().pieces[i].count});
    divide(kHost, spans, static_cast<float>(node_.size()));
  }
  if (on_host) return;
  job_.memory->start_from_host(floats_.floats(), sums, floats_.bytes().size());
  job_.memory->wait();
}

// The results of this rank's pieces become its row.
void NodeExchange::narrow_results() {
  const bool on_host = job_.memory->on_host();
  if (!on_host) {
    job_.memory->start_to_host(host_floats_.floats(), floats_.floats(), floats_.bytes().size());
    job_.memory->wait();
  }
  const float* const results = on_host ? floats_.floats() : host_floats_.floats();
  std::vector<NarrowSpan> half;
  for (size_t i = 0; i < offsets_.size(); ++i) {
    const auto [first, count, at] = mine().pieces[i];
    std::byte* const to = row(place()).data() + at;
    if (job_.tensors[i].dtype != DType::f32)
      half.push_back({results + offsets_[i], to, count, job_.tensors[i].dtype});
    else if (count > 0)
      std::memcpy(to, results + offsets_[i], count * sizeof(float));
  }
  narrow(kHost, half);
}

bool NodeExchange::finite_row() {
  std::vector<ResultSpan> results;
  for (size_t i = 0; i < offsets_.size(); ++i)
    results.push_back({row(place()).data() + mine().pieces[i].at, mine().pieces[i].count, job_.tensors[i].dtype});
  finite_.check(kHost, results);
  const bool bad = finite_.bad();
  finite_.end_step(kHost);
  return !bad;
}

bool NodeExchange::gather(std::span<void* const> out, bool check) {
  {
    const auto timing = timer_.decode();
    narrow_results();
    const uint64_t bad = check && !finite_row();
    std::memcpy(row(place(), kFlagBytes).data() + mine().bytes, &bad, sizeof bad);
  }
  std::vector<Bytes> rows;
  for (size_t p = 0; p < layout_.size(); ++p) rows.push_back(row(p, kFlagBytes));
  {
    const auto timing = timer_.wait();
    node_.all_gather(rows[place()], rows).wait();
  }
  const auto timing = timer_.decode();
  bool fine = true;
  for (size_t p = 0; p < layout_.size(); ++p) {
    uint64_t bad = 0;
    std::memcpy(&bad, rows[p].data() + layout_[p].bytes, sizeof bad);
    fine &= bad == 0;
    for (size_t i = 0; i < out.size(); ++i) {
      const auto [first, count, at] = layout_[p].pieces[i];
      const uint64_t element = bytes_of(job_.tensors[i].dtype);
      if (count > 0)
        job_.memory->start_from_host(static_cast<std::byte*>(out[i]) + first * element, rows[p].data() + at,
                                     count * element);
    }
  }
  job_.memory->wait();
  return fine;
}

uint64_t NodeExchange::bytes_sent() const {
  uint64_t bytes = (mine().bytes + kFlagBytes) * (layout_.size() - 1);
  for (size_t p = 0; p < layout_.size(); ++p) bytes += p == place() ? 0 : layout_[p].bytes;
  return bytes;
}

uint64_t NodeExchange::memory() const { return rows_.held() + received_.held() + host_floats_.held(); }

}  // namespace gradwire
