// SPDX-License-Identifier: Apache-2.0
// Plans and messages for C programs. A plan with one tensor whose name is empty has the messages of `gradwire encode`.
#include "c/plan.h"

#include <algorithm>
#include <cstring>

#include "c/tensors.h"
#include "gradwire/learn.h"
#include "gradwire/message.h"

namespace gradwire::c_api {
namespace {

// Messages are made of words. One that stands elsewhere is copied; most stand where malloc() has put them.
bool word_aligned(const void* message) { return reinterpret_cast<uintptr_t>(message) % alignof(uint32_t) == 0; }

std::string text_of(const NamedTensor& tensor) { return "tensor '" + tensor.name + "'"; }

void add(gw_plan& plan, const char* name, DType dtype, uint64_t count, int dimensions, uint64_t rows = 0) {
  if (count > kMaxElements)
    refuse_usage("count is " + std::to_string(count) + "; allowed are up to " + std::to_string(kMaxElements), "count");
  if (dimensions < 0)
    refuse_usage("dimensions is " + std::to_string(dimensions) + "; allowed is 0 or more", "dimensions");
  for (const NamedTensor& tensor : plan.tensors)
    if (tensor.name == name) refuse_usage(text_of(tensor) + " is in the plan already; names must differ", "name");
  plan.codecs.resize(plan.tensors.size());  // longer, if memory ran out between the two lines below
  plan.codecs.push_back(plan.rules.codec_for(name, dimensions, count));
  plan.tensors.push_back({name, count, dtype, dimensions, rows});
  plan.runner.reset();
}

void add_matrix(gw_plan& plan, const char* name, DType dtype, uint64_t rows, uint64_t columns) {
  if (rows != 0 && columns > kMaxElements / rows)
    refuse_usage("rows and columns are " + std::to_string(rows) + " and " + std::to_string(columns) +
                     "; allowed are up to " + std::to_string(kMaxElements) + " elements",
                 "rows");
  add(plan, name, dtype, rows * columns, 2, rows);
}

// The tensors of a plan as a message lists them, with the codecs of the plan.
std::vector<TensorSpec> specs(const gw_plan& plan) {
  if (plan.has_lowrank())
    refuse_usage("the plan's codec is '" + plan.text + "', and lowrank is no codec of messages: a reducer has it",
                 "codec");
  std::vector<TensorSpec> list;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const NamedTensor& tensor = plan.tensors[i];
    list.push_back({.name = tensor.name, .count = tensor.count, .dtype = tensor.dtype, .codec = plan.codecs[i]});
  }
  return list;
}

size_t encode(gw_plan& plan, std::span<const void* const> tensors, const Stamp& stamp, std::span<std::byte> room) {
  if (!plan.runner) plan.layout.emplace(specs(plan));
  const size_t bytes = plan.layout->message_bytes();
  if (room.size() < bytes)
    refuse_usage("room is " + std::to_string(room.size()) + "; the message has " + std::to_string(bytes) + " bytes",
                 "room");
  if (!plan.runner) plan.runner = make_runner(*plan.layout, Device{});
  std::vector<std::byte> copy(word_aligned(room.data()) ? 0 : bytes);
  plan.runner->encode(tensors, stamp, copy.empty() ? room.first(bytes) : std::span(copy));
  if (!copy.empty()) std::memcpy(room.data(), copy.data(), bytes);
  return bytes;
}

// What is decoded is the message's own list, with its codecs and tables, into elements of the plan's types.
void decode(const gw_plan& plan, std::span<const std::byte> message, std::span<void* const> tensors) {
  Head head = read_head(message);
  if (head.tensors.size() != plan.tensors.size())
    refuse_usage("the message has " + std::to_string(head.tensors.size()) + " tensors; the plan has " +
                     std::to_string(plan.tensors.size()),
                 "tensors");
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const NamedTensor& mine = plan.tensors[i];
    TensorSpec& theirs = head.tensors[i];
    if (theirs.name_hash != hash_name(mine.name))
      refuse_usage("number " + std::to_string(i) + " of the message is not " + text_of(mine), "name");
    if (theirs.first != 0 || theirs.count != mine.count)
      refuse_usage(text_of(mine) + " has " + std::to_string(mine.count) + " elements; the message has " +
                       std::to_string(theirs.count) + " of it, from " + std::to_string(theirs.first) + " on",
                   "count");
    theirs.dtype = mine.dtype;
  }
  const Plan layout(std::move(head.tensors));
  make_runner(layout, Device{})->decode(message, tensors);
}

void inspect(std::span<const std::byte> message, uint32_t tensor, gw_info& info) {
  if (info.struct_bytes < sizeof info)
    refuse_usage("struct_bytes is " + std::to_string(info.struct_bytes) + "; set it to sizeof(gw_info)",
                 "struct_bytes");
  const Head head = read_head(message);
  if (tensor >= head.tensors.size())
    refuse_usage("tensor is " + std::to_string(tensor) + "; the message has " + std::to_string(head.tensors.size()) +
                     " tensors, numbered from 0 on",
                 "tensor");
  const TensorSpec& one = head.tensors[tensor];
  info.tensors = static_cast<uint32_t>(head.tensors.size());
  info.dtype = static_cast<int>(one.dtype);
  info.count = one.count;
  info.step = head.stamp.step;
  info.rank = head.stamp.rank;
  info.world = head.stamp.world;
  std::memset(info.codec, 0, sizeof info.codec);
  const std::string spec = one.codec.wire_spec();
  std::memcpy(info.codec, spec.data(), std::min(spec.size(), sizeof info.codec - 1));
}

}  // namespace
}  // namespace gradwire::c_api

using namespace gradwire;
using namespace gradwire::c_api;

extern "C" {

int gw_plan_open(const char* codec, gw_plan** plan) {
  return guarded([&] {
    *given(plan, "plan") = nullptr;
    *plan = new gw_plan(given(codec, "codec"));
  });
}

void gw_plan_close(gw_plan* plan) { delete plan; }

int gw_plan_add(gw_plan* plan, const char* name, int dtype, uint64_t count, int dimensions) {
  return guarded([&] { add(*given(plan, "plan"), given(name, "name"), dtype_of(dtype), count, dimensions); });
}

int gw_plan_add_matrix(gw_plan* plan, const char* name, int dtype, uint64_t rows, uint64_t columns) {
  return guarded([&] { add_matrix(*given(plan, "plan"), given(name, "name"), dtype_of(dtype), rows, columns); });
}

int gw_plan_fit(gw_plan* plan, const void* const* tensors) {
  return guarded([&] {
    const auto values = elements_of<const void*>(given(plan, "plan")->tensors, tensors, "tensors");
    std::vector<Codec> fitted;
    for (size_t i = 0; i < values.size(); ++i)
      fitted.push_back(fit(plan->codecs[i], values[i], plan->tensors[i].count, plan->tensors[i].dtype));
    plan->codecs = std::move(fitted);
    plan->runner.reset();
  });
}

int gw_plan_bytes(gw_plan* plan, size_t* bytes) {
  return guarded([&] {
    given(plan, "plan");
    given(bytes, "bytes");
    *bytes = plan->runner ? plan->layout->message_bytes() : Plan(specs(*plan)).message_bytes();
  });
}

int gw_encode(gw_plan* plan, const void* const* tensors, uint64_t step, uint64_t seed, void* message, size_t room,
              size_t* written) {
  return guarded([&] {
    const auto values = elements_of<const void*>(given(plan, "plan")->tensors, tensors, "tensors");
    given(message, "message");
    given(written, "written");
    *written = encode(*plan, values, Stamp{.seed = seed, .step = step}, {static_cast<std::byte*>(message), room});
  });
}

int gw_decode(gw_plan* plan, const void* message, size_t bytes, void* const* tensors) {
  return guarded([&] {
    const auto values = elements_of<void*>(given(plan, "plan")->tensors, tensors, "tensors");
    const std::span<const std::byte> all(static_cast<const std::byte*>(given(message, "message")), bytes);
    if (word_aligned(message)) return decode(*plan, all, values);
    decode(*plan, std::vector<std::byte>(all.begin(), all.end()), values);
  });
}

int gw_inspect(const void* message, size_t bytes, uint32_t tensor, gw_info* info) {
  return guarded([&] {
    given(info, "info");
    const std::span<const std::byte> all(static_cast<const std::byte*>(given(message, "message")), bytes);
    if (word_aligned(message)) return inspect(all, tensor, *info);
    inspect(std::vector<std::byte>(all.begin(), all.end()), tensor, *info);
  });
}

}  // extern "C"
