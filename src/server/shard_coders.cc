// SPDX-License-Identifier: Apache-2.0
#include "server/shard_coders.h"

#include <fmt/format.h>

#include <algorithm>

#include "gradwire/error.h"
#include "gradwire/message.h"

namespace gradwire::server {
namespace {

constexpr size_t kKnownTables = 4;

bool may_carry(const Codec& expected, const Codec& codec) {
  return codec.wire_spec() == expected.wire_spec() || (expected.traits().learns && codec == Codec());
}

}  // namespace

ShardWriter::ShardWriter(std::vector<TensorSpec> specs, Direction direction, const Device& device, const ShardRun& run)
    : learning_(specs, direction, run), coding_(std::move(specs), device) {}

Runner& ShardWriter::runner(uint64_t step, double rate) {
  if (!learning_.empty()) coding_.recode(learning_.specs(step, rate));
  return coding_.runner();
}

ShardReader::ShardReader(std::vector<TensorSpec> specs, const Device& device)
    : specs_(std::move(specs)), device_(device) {
  for (const TensorSpec& spec : specs_) elements_ += spec.count;
}

Runner& ShardReader::runner(std::span<const std::byte> message) {
  const Head head =
      read_head(message, {.max_elements = elements_, .max_tensors = static_cast<uint32_t>(specs_.size())});
  if (head.tensors.size() != specs_.size())
    throw Error(ErrorKind::frame,
                fmt::format("bad message: it has {} tensors; expected {}", head.tensors.size(), specs_.size()),
                "tensors");
  std::vector<Codec> codecs = codecs_of(head.tensors);
  // Building a plan is expensive, so those that were used last are kept.
  const auto known =
      std::find_if(known_.begin(), known_.end(), [&](const KnownTables& one) { return one.codecs == codecs; });
  if (known != known_.end()) {
    std::rotate(known_.begin(), known, known + 1);
    return *known_.front().runner;
  }
  std::vector<TensorSpec> specs = specs_;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!may_carry(specs[i].codec, codecs[i]))
      throw Error(ErrorKind::frame,
                  fmt::format("bad message: tensor[{}] is coded by {}; expected {}", i, codecs[i].wire_spec(),
                              specs[i].codec.wire_spec()),
                  "spec");
    specs[i].codec = codecs[i];
  }
  KnownTables tables{std::move(codecs), std::make_unique<Plan>(std::move(specs)), nullptr};
  tables.runner = make_runner(*tables.plan, device_);
  if (known_.size() == kKnownTables) known_.pop_back();
  known_.insert(known_.begin(), std::move(tables));
  return *known_.front().runner;
}

}  // namespace gradwire::server
