// SPDX-License-Identifier: Apache-2.0
#include "collective/job.h"

#include <fmt/format.h>

#include <set>

#include "collective/feedback_rule.h"
#include "gradwire/error.h"
#include "gradwire/message.h"

namespace gradwire {
namespace {

std::vector<Codec> codecs_for(const ReduceOptions& options, Direction direction, std::span<const NamedTensor> tensors) {
  // Downwards there is one sender per element, so nothing averages its random errors out: round to nearest.
  const Rules rules = direction == Direction::up ? Rules::parse(options.up)
                      : options.down.empty()     ? Rules::parse(options.up).nearest()
                                                 : Rules::parse(options.down);
  std::vector<Codec> codecs;
  for (const NamedTensor& tensor : tensors)
    codecs.push_back(rules.codec_for(tensor.name, tensor.dimensions, tensor.count));
  return codecs;
}

std::string text_of(const Device& device) {
  return device.kind == Device::Kind::cuda ? fmt::format("cuda {}", device.index) : "the cpu";
}

}  // namespace

Job::Job(std::string name, std::span<const NamedTensor> list, const ReduceOptions& given, JobPlace place, size_t bare)
    : collective(std::move(name)),
      tensors(list.begin(), list.end()),
      firsts(list.size()),
      options(given),
      memory(memory_of(given.device)),
      given_(tensors),
      place_(place) {
  if (options.device.kind == Device::Kind::cuda && cuda_devices() == 0)
    throw Error(ErrorKind::unsupported, "no GPU can be used: " + cuda_description(), "device");
  // Options that would have no effect are refused: whoever set them expects one.
  if (options.nodes != 0)
    throw Error(ErrorKind::usage,
                fmt::format("nodes is {}; only a Reducer and all_reduce() work on two levels", options.nodes), "nodes");
  if (collective == "gather" && !options.down.empty())
    throw Error(ErrorKind::usage,
                fmt::format("down is '{}'; the method gather sends nothing down, so only scatter has a down codec",
                            options.down),
                "down");
  if (options.residual != DType::f32 && options.feedback == ReduceOptions::Feedback::off &&
      options.owner_feedback == ReduceOptions::Feedback::off)
    throw Error(ErrorKind::usage,
                fmt::format("residual is {}; with feedback and owner_feedback off there are no residuals",
                            gradwire::name_of(options.residual)),
                "residual");
  if (!(options.decay > 0 && options.decay <= 1))
    throw Error(ErrorKind::usage, fmt::format("decay is {}; allowed is above 0, to 1", options.decay), "decay");
  if (options.decay != 1 && options.feedback == ReduceOptions::Feedback::off &&
      options.owner_feedback == ReduceOptions::Feedback::off)
    throw Error(ErrorKind::usage,
                fmt::format("decay is {}; with feedback and owner_feedback off there are no residuals", options.decay),
                "decay");
  if (!options.model.empty() && options.commit != ReduceOptions::Commit::manual)
    throw Error(ErrorKind::usage, "model is given; reducers that learn together need commit = manual", "model");
  std::set<std::string_view> names;
  for (const NamedTensor& tensor : tensors)
    if (!names.insert(tensor.name).second)
      throw Error(
          ErrorKind::usage,
          fmt::format("tensor name '{}' stands twice in the list; names must differ, because residuals and random "
                      "bits depend on them",
                      tensor.name),
          "name");
  up = codecs_for(options, Direction::up, tensors);
  down = codecs_for(options, Direction::down, tensors);
  up_text_ = Rules::parse(options.up).str();
  down_text_ = options.down.empty() ? "as up, to nearest" : Rules::parse(options.down).str();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool may = i + bare < tensors.size();
    up_feedback.push_back(may && wants_residual(up[i], options.feedback));
    down_feedback.push_back(may && wants_residual(down[i], options.owner_feedback));
  }
  for (size_t i = 0; place_.places > 1 && i < tensors.size(); ++i) {
    const TensorPiece piece = piece_of(tensors[i].name, tensors[i].count, place_.place, place_.places);
    tensors[i].count = piece.count;
    tensors[i].dtype = DType::f32;
    firsts[i] = piece.first;
  }
}

Handshake Job::handshake() const {
  Handshake handshake;
  handshake.common = {
      {"version", std::to_string(kWireVersion)},
      {"collective", collective},
      {"op", options.op == ReduceOptions::Op::mean ? "mean" : "sum"},
      {"up", up_text_},
      {"down", down_text_},
      {"feedback", fmt::format("{}, owner {}, {}, decay {}", name_of(options.feedback), name_of(options.owner_feedback),
                               gradwire::name_of(options.residual), options.decay)},
      {"seed", std::to_string(options.seed)},
      {"steps", std::to_string(options.steps)}};
  for (size_t i = 0; i < tensors.size(); ++i)
    handshake.tensors.push_back({{"name", tensors[i].name},
                                 {"count", std::to_string(tensors[i].count)},
                                 {"dtype", std::string(gradwire::name_of(tensors[i].dtype))},
                                 {"codec", fmt::format("{} up, {} down", up[i].str(), down[i].str())}});
  return handshake;
}

uint64_t Job::elements_with(const std::string& spec, Direction direction) const {
  const std::vector<NamedTensor>& all = options.model.empty() ? given_ : options.model;
  const std::vector<Codec> codecs = codecs_for(options, direction, all);
  uint64_t elements = 0;
  for (size_t i = 0; i < all.size(); ++i)
    if (codecs[i].str() == spec) elements += all[i].count;
  return elements;
}

std::vector<Shard> Job::whole(int owner) const {
  std::vector<Shard> all;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].count > 0) all.push_back({i, firsts[i], tensors[i].count, owner});
  return all;
}

std::vector<Shard> Job::owned(int world) const {
  std::vector<Shard> all;
  for (size_t i = 0; i < tensors.size(); ++i)
    for (const OwnedRun& run : owners(tensors[i].name, tensors[i].count, world, place_.places))
      all.push_back({i, firsts[i] + run.first, run.count, run.owner});
  return all;
}

std::vector<Shard> Job::of_owner(std::span<const Shard> all, int owner) {
  std::vector<Shard> mine;
  for (const Shard& shard : all)
    if (shard.owner == owner) mine.push_back(shard);
  return mine;
}

std::vector<TensorSpec> Job::specs(std::span<const Shard> shards, Direction direction, bool as_f32) const {
  std::vector<TensorSpec> list;
  for (const Shard& shard : shards) {
    const NamedTensor& tensor = tensors[shard.tensor];
    list.push_back({.name = tensor.name,
                    .count = shard.count,
                    .dtype = as_f32 ? DType::f32 : tensor.dtype,
                    .codec = direction == Direction::up ? up[shard.tensor] : down[shard.tensor],
                    .first = shard.first});
  }
  return list;
}

void Job::add_residuals(ErrorFeedback& feedback, std::span<const Shard> shards, Direction direction) const {
  const Device &there = feedback.device(), &here = options.device;
  const bool cuda = here.kind == Device::Kind::cuda;
  if (there.kind != here.kind || (cuda && there.index != here.index))
    throw Error(ErrorKind::usage,
                fmt::format("the residuals are on {}, the tensors on {}; load or make them for that device",
                            text_of(there), text_of(here)),
                "feedback");
  for (const Shard& shard : shards)
    if ((direction == Direction::up ? up_feedback[shard.tensor] : down_feedback[shard.tensor]) &&
        !feedback.holds(direction, tensors[shard.tensor].name, shard.count, shard.first))
      feedback.add(direction, tensors[shard.tensor].name, shard.count, shard.first);
}

void Job::check_pointers(std::span<const void* const> pointers, const char* what) const {
  if (pointers.size() != tensors.size())
    throw Error(ErrorKind::usage,
                fmt::format("{} has {} pointers; there are {} tensors", what, pointers.size(), tensors.size()), what);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].count == 0) continue;
    if (!pointers[i])
      throw Error(ErrorKind::usage, fmt::format("{} is null for tensor {} ('{}')", what, i, tensors[i].name), what);
    if (reinterpret_cast<uintptr_t>(pointers[i]) % bytes_of(tensors[i].dtype) != 0)
      throw Error(ErrorKind::usage,
                  fmt::format("{} is not aligned to the elements of tensor {} ('{}')", what, i, tensors[i].name), what);
  }
}

}  // namespace gradwire
