// SPDX-License-Identifier: Apache-2.0
// Malformed messages for tests: a well-formed message is encoded, some of its bytes are changed, and its checksums are
// made right again, so that the checks behind the checksums run. A slip in the table of offsets itself would show in
// the golden frames and in the second decoder, which is written from docs/wire-format.md alone.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/error.h"
#include "gradwire/message.h"
#include "gradwire/runner.h"
#include "message/head_fields.h"
#include "message/layout.h"
#include "message/wire_offsets.h"

namespace gradwire::test {

namespace header = wire::header;
namespace row = wire::row;

using ByteVector = std::vector<std::byte>;

// Runs `read`; the field that it was refused for, or "" when it was not. A refusal must be an Error of kind frame that
// names a field; any other exception goes on to the test and fails it.
template <class Read>
std::string refused_field(const Read& read) {
  try {
    read();
    return "";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::frame) << e.what();
    EXPECT_FALSE(e.field().empty()) << e.what();
    return e.field();
  }
}

// The way of `gradwire decode`: the head against limits, a plan from what it says, a runner, decode.
inline void read_message(std::span<const std::byte> message, const Limits& limits = {.max_elements = 1 << 18}) {
  const Head head = read_head(message, limits);
  verify_body(message, head);
  const Plan plan(head.tensors);
  const auto runner = make_runner(plan, Device{});
  std::vector<ByteVector> tensors;
  std::vector<void*> outputs;
  for (const TensorSpec& t : head.tensors) outputs.push_back(tensors.emplace_back(t.count * bytes_of(t.dtype)).data());
  runner->decode(message, outputs);
}

// Each set function changes the message and leaves the checksums wrong; field() makes them right and reads it.
class MessageBuilder {
 public:
  // Tensors whose values run through -1 .. 1 in steps that no rounding hides.
  explicit MessageBuilder(const std::vector<TensorSpec>& tensors) {
    const Plan plan(tensors);
    std::vector<std::vector<float>> values;
    std::vector<const void*> inputs;
    for (const TensorSpec& t : tensors) {
      values.emplace_back(t.count);
      for (uint64_t i = 0; i < t.count; ++i) values.back()[i] = static_cast<float>((i * 37 + 11) % 101) / 50.0f - 1.0f;
      inputs.push_back(values.back().data());
    }
    bytes.resize(plan.message_bytes());
    make_runner(plan, Device{})->encode(inputs, {.seed = 1, .step = 7, .stage = 1, .rank = 2, .world = 5}, bytes);
  }
  MessageBuilder(const Codec& codec, uint64_t count) : MessageBuilder({{"w", count, DType::f32, codec}}) {}
  MessageBuilder(const std::string& spec, uint64_t count)
      : MessageBuilder({{"w", count, DType::f32, Codec::parse(spec)}}) {}

  uint32_t head_bytes() const { return get_field<uint32_t>(bytes, header::head_bytes); }
  size_t table_at() const {  // where the tensor table starts
    size_t at = header::size;
    for (uint32_t i = 0; i < get_field<uint32_t>(bytes, header::spec_count); ++i)
      at += spec_text_bytes(at) + get_field<uint16_t>(bytes, at + wire::spec::table_bytes);
    return at;
  }
  size_t fitted_at() const { return header::size + spec_text_bytes(header::size); }  // the first spec's table
  size_t body_at(uint64_t word) const { return head_bytes() + word * 4; }

  template <class T>
  MessageBuilder& set(size_t at, T value) {
    put_field(bytes, at, value);
    return *this;
  }
  template <class T>
  MessageBuilder& set_row(uint32_t index, size_t at, T value) {
    return set(table_at() + index * row::size + at, value);
  }
  MessageBuilder& set_word(uint64_t word, uint32_t value) { return set(body_at(word), value); }
  uint32_t word(uint64_t word) const { return get_field<uint32_t>(bytes, body_at(word)); }

  // Writes the head anew with these specs; the table and the body stay.
  MessageBuilder& set_specs(const std::vector<std::string>& specs) {
    const size_t rows = get_field<uint32_t>(bytes, header::tensor_count) * size_t{row::size}, from = table_at();
    ByteVector head(bytes.begin(), bytes.begin() + header::size);
    for (const std::string& spec : specs) {
      const size_t at = head.size();
      head.resize(at + wire::spec::text + (spec.size() + 3) / 4 * 4);
      put_field(std::span(head), at, static_cast<uint16_t>(spec.size()));
      std::memcpy(head.data() + at + wire::spec::text, spec.data(), spec.size());
    }
    head.insert(head.end(), bytes.begin() + static_cast<ptrdiff_t>(from),
                bytes.begin() + static_cast<ptrdiff_t>(from + rows));
    head.resize((head.size() + wire::kHeadAlign - 1) / wire::kHeadAlign * wire::kHeadAlign);
    const size_t head_size = head.size();
    head.insert(head.end(), bytes.begin() + head_bytes(), bytes.end());
    bytes = std::move(head);
    set(header::spec_count, static_cast<uint32_t>(specs.size()));
    set(header::head_bytes, static_cast<uint32_t>(head_size));
    return set(header::total_bytes, uint64_t{bytes.size()});
  }

  // The field that the message is refused for once its checksums are right; "" when it is taken.
  std::string field(const Limits& limits = {.max_elements = 1 << 18}) {
    reseal(bytes);
    return refused_field([&] { read_message(bytes, limits); });
  }

  ByteVector bytes;

 private:
  // Bytes of the spec at `at`, without its table.
  size_t spec_text_bytes(size_t at) const {
    return wire::spec::text + (get_field<uint16_t>(bytes, at + wire::spec::length) + 3u) / 4 * 4;
  }
};

}  // namespace gradwire::test
