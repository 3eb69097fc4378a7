// SPDX-License-Identifier: Apache-2.0
#include "server/signature.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "collective/feedback_rule.h"
#include "gradwire/error.h"

namespace gradwire::server {
namespace {

constexpr size_t kMaxName = 1024;
constexpr uint64_t kMaxIndivisible = 15'000'000;  // elements; by fp32 that is just below kMaxFrame

// A tensor with a codec whose unit is the whole tensor cannot be divided.
bool indivisible(const Variable& one, const Rules& up, const Rules& down) {
  const int dimensions = static_cast<int>(one.shape.size());
  return up.codec_for(one.name, dimensions, one.count()).traits().unit == 0 ||
         down.codec_for(one.name, dimensions, one.count()).traits().unit == 0;
}

[[noreturn]] void refuse(const std::string& words) {
  throw Error(ErrorKind::frame, "bad signature: " + words, "signature");
}

nlohmann::json json_of(const std::vector<Variable>& variables) {
  nlohmann::json list = nlohmann::json::array();
  for (const Variable& one : variables) list.push_back({one.name, one.shape});
  return list;
}

// A checkpoint has all by their names, so no two have the same.
std::vector<Variable> variables_of(const nlohmann::json& text, const char* field, std::set<std::string>& names) {
  std::vector<Variable> list;
  const auto found = text.find(field);
  if (found == text.end() || !found->is_array()) refuse(fmt::format("{} is not a list", field));
  for (const nlohmann::json& entry : *found) {
    if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() || !entry[1].is_array())
      refuse(fmt::format("{}[{}] is not [name, shape]", field, list.size()));
    Variable one{entry[0].get<std::string>(), {}};
    if (one.name.empty() || one.name.size() > kMaxName)
      refuse(fmt::format("{}[{}]: its name has {} bytes; allowed are 1 to {}", field, list.size(), one.name.size(),
                         kMaxName));
    if (!names.insert(one.name).second) refuse(fmt::format("'{}' is there twice", one.name));
    if (one.name.starts_with("gradwire.") || one.name == "__metadata__")
      refuse(fmt::format("{}[{}] is '{}', a name that checkpoints keep for themselves", field, list.size(), one.name));
    uint64_t count = 1;
    if (entry[1].size() > 16) refuse(fmt::format("'{}' has {} dimensions; allowed are 16", one.name, entry[1].size()));
    for (const nlohmann::json& size : entry[1]) {
      if (!size.is_number_unsigned() || size.get<uint64_t>() > uint64_t{1} << 40)
        refuse(fmt::format("'{}': a size is {}; allowed is 0 to 2^40", one.name,
                           size.is_structured() ? size.type_name() : size.dump()));
      const uint64_t length = size.get<uint64_t>();
      if (length > 0 && count > (uint64_t{1} << 40) / length)
        refuse(fmt::format("'{}' has more than 2^40 elements", one.name));
      count *= length;
      one.shape.push_back(size.get<int64_t>());
    }
    list.push_back(std::move(one));
  }
  return list;
}

ServerSgd sgd_of(const nlohmann::json& text) {
  const auto number = [&](const char* field, double most) {
    const auto found = text.is_object() ? text.find(field) : text.end();
    if (!text.is_object() || found == text.end() || !found->is_number()) refuse(fmt::format("sgd has no {}", field));
    const double value = found->get<double>();
    if (!(value >= 0 && value <= most)) refuse(fmt::format("sgd: {} is {}; allowed are 0 to {}", field, value, most));
    return value;
  };
  return {.momentum = number("momentum", 1), .weight_decay = number("weight_decay", 1e3)};
}

std::string words_of(const std::optional<ServerSgd>& sgd) {
  return sgd ? fmt::format("sgd with momentum {} and weight decay {}", sgd->momentum, sgd->weight_decay) : "qadam";
}

std::string canonical(const nlohmann::json& text, const char* field) {
  const auto found = text.find(field);
  if (found == text.end() || !found->is_string()) refuse(fmt::format("{} is not a text", field));
  try {
    return Rules::parse(found->get<std::string>()).str();
  } catch (const Error& error) {
    refuse(fmt::format("{}: {}", field, error.what()));
  }
}

ReduceOptions::Feedback feedback_of(const nlohmann::json& text) {
  const auto found = text.find("feedback");
  if (found == text.end()) return ReduceOptions::Feedback::codec;  // a checkpoint of an earlier version has none
  if (!found->is_string()) refuse("feedback is not a text");
  try {
    return parse_feedback(found->get<std::string>());
  } catch (const Error& error) {
    refuse(error.what());
  }
}

std::string difference_of(const char* what, const std::vector<Variable>& here, const std::vector<Variable>& there) {
  for (size_t i = 0; i < std::min(here.size(), there.size()); ++i)
    if (here[i].name != there[i].name || here[i].shape != there[i].shape)
      return fmt::format("{} {} is '{}' {} at the server, '{}' {} here", what, i, here[i].name, here[i].shape,
                         there[i].name, there[i].shape);
  if (here.size() != there.size())
    return fmt::format("the server has {} {}s, this worker {}", here.size(), what, there.size());
  return {};
}

}  // namespace

uint64_t Variable::count() const {
  uint64_t product = 1;
  for (int64_t size : shape) product *= static_cast<uint64_t>(size);
  return product;
}

uint64_t Signature::elements() const {
  uint64_t sum = 0;
  for (const Variable& one : parameters) sum += one.count();
  return sum;
}

uint64_t ShardLayout::elements() const {
  uint64_t sum = 0;
  for (const ParameterRange& range : ranges) sum += range.count;
  return sum;
}

std::vector<float> ShardLayout::gather(std::span<const std::span<const float>> parameters) const {
  std::vector<float> values;
  values.reserve(elements());
  for (const ParameterRange& range : ranges) {
    const std::span<const float> from = parameters[range.parameter].subspan(range.first, range.count);
    values.insert(values.end(), from.begin(), from.end());
  }
  return values;
}

nlohmann::json Signature::json() const {
  nlohmann::json text = {{"parameters", json_of(parameters)},
                         {"buffers", json_of(buffers)},
                         {"up", Rules::parse(up).str()},
                         {"down", Rules::parse(down).str()},
                         {"feedback", name_of(feedback)},
                         {"sends_updates", sends_updates},
                         {"pools", pools},
                         {"seed", seed},
                         {"steps", steps},
                         {"model", model}};
  if (sgd) text["sgd"] = {{"momentum", sgd->momentum}, {"weight_decay", sgd->weight_decay}};
  return text;
}

Signature Signature::parse(const nlohmann::json& text) {
  if (!text.is_object()) refuse("it is not an object");
  Signature result;
  std::set<std::string> names;
  result.parameters = variables_of(text, "parameters", names);
  result.buffers = variables_of(text, "buffers", names);
  if (result.parameters.empty()) refuse("there are no parameters");
  result.up = canonical(text, "up");
  result.down = canonical(text, "down");
  result.feedback = feedback_of(text);
  for (auto [field, to] : {std::pair{"sends_updates", &result.sends_updates}, std::pair{"pools", &result.pools}}) {
    const auto found = text.find(field);
    if (found == text.end() || !found->is_boolean()) refuse(fmt::format("{} is neither true nor false", field));
    *to = found->get<bool>();
  }
  if (const auto found = text.find("sgd"); found != text.end()) result.sgd = sgd_of(*found);
  if (const auto found = text.find("seed"); found != text.end() && found->is_number_unsigned())
    result.seed = found->get<uint64_t>();
  if (const auto found = text.find("steps"); found != text.end()) {  // a checkpoint of an earlier version has none
    if (!found->is_number_unsigned() || found->get<uint64_t>() > kMostSteps)
      refuse(fmt::format("steps is {}; allowed are 0 to {}",
                         found->is_structured() ? found->type_name() : found->dump().substr(0, 32), kMostSteps));
    result.steps = found->get<uint64_t>();
  }
  if (const auto found = text.find("model"); found != text.end() && found->is_string())
    result.model = found->get<std::string>().substr(0, kMaxName);
  return result;
}

std::string Signature::difference(const Signature& other) const {
  if (std::string words = difference_of("parameter", parameters, other.parameters); !words.empty()) return words;
  if (std::string words = difference_of("buffer", buffers, other.buffers); !words.empty()) return words;
  const auto rules = [](const std::string& text) { return Rules::parse(text).str(); };
  if (rules(up) != rules(other.up)) return fmt::format("up is {} at the server, {} here", rules(up), rules(other.up));
  if (rules(down) != rules(other.down))
    return fmt::format("down is {} at the server, {} here", rules(down), rules(other.down));
  if (feedback != other.feedback)
    return fmt::format("feedback is {} at the server, {} here", name_of(feedback), name_of(other.feedback));
  if (sends_updates != other.sends_updates)
    return fmt::format("the server sends {}, this worker wants {}", sends_updates ? "updates" : "weights",
                       other.sends_updates ? "updates" : "weights");
  if (pools != other.pools)
    return fmt::format("moments are {} at the server, {} here", pools ? "shared" : "local",
                       other.pools ? "shared" : "local");
  if (sgd != other.sgd)
    return fmt::format("the optimizer is {} at the server, {} here", words_of(sgd), words_of(other.sgd));
  return {};
}

void check_limits(const Signature& signature, const ModelLimits& limits) {
  const uint64_t tensors = signature.parameters.size() + signature.buffers.size();
  if (tensors > limits.max_tensors)
    throw Error(ErrorKind::usage,
                fmt::format("the model has {} tensors; this server takes {}", tensors, limits.max_tensors), "tensors");
  uint64_t sum = 0;
  for (const auto* list : {&signature.parameters, &signature.buffers})
    for (const Variable& one : *list) {
      sum += one.count();
      if (sum > limits.max_elements)
        throw Error(
            ErrorKind::usage,
            fmt::format("the model has more than {} elements, which is what this server takes", limits.max_elements),
            "elements");
    }
  // What cannot be divided travels in one frame.
  const Rules up = Rules::parse(signature.up), down = Rules::parse(signature.down);
  for (const Variable& one : signature.parameters)
    if (indivisible(one, up, down) && one.count() > kMaxIndivisible)
      throw Error(ErrorKind::usage,
                  fmt::format("'{}' has {} elements, and a codec that works on whole tensors; with one, at most {} go",
                              one.name, one.count(), kMaxIndivisible),
                  "elements");
  uint64_t buffers = 0;
  for (const Variable& one : signature.buffers) buffers += one.count();
  if (buffers > kMaxIndivisible)
    throw Error(ErrorKind::usage, fmt::format("the buffers have {} elements; at most {} go", buffers, kMaxIndivisible),
                "elements");
}

std::vector<ShardLayout> shard_layouts(const Signature& signature, uint64_t shard_elements) {
  const Rules up = Rules::parse(signature.up), down = Rules::parse(signature.down);
  std::vector<ShardLayout> shards;
  ShardLayout open{ShardRole::weights, {}};
  uint64_t elements = 0;  // of the open one
  const auto add = [&](ParameterRange range) {
    open.ranges.push_back(range);
    elements += range.count;
  };
  const auto close = [&] {
    if (!open.ranges.empty()) shards.push_back(std::move(open));
    open = {ShardRole::weights, {}};
    elements = 0;
  };
  for (size_t i = 0; i < signature.parameters.size(); ++i) {
    const Variable& one = signature.parameters[i];
    const uint64_t count = one.count();
    if (elements + count > shard_elements) close();
    if (indivisible(one, up, down) || count <= shard_elements) {
      add({i, 0, count});
      continue;
    }
    // The units of codecs must not straddle shards: ranges begin at multiples that every codec can live with.
    const uint64_t step = std::max(shard_elements / kTileElements, uint64_t{1}) * kTileElements;
    for (uint64_t first = 0; first < count; first += step) {
      add({i, first, std::min(step, count - first)});
      if (first + step < count) close();
    }
  }
  close();
  if (signature.pools)
    for (size_t i = 0, weights = shards.size(); i < weights; ++i) shards.push_back({ShardRole::pool, shards[i].ranges});
  return shards;
}

std::vector<TensorSpec> specs_of(const Signature& signature, const ShardLayout& layout, ShardMessage message) {
  const Rules rules = Rules::parse(layout.role == ShardRole::pool ? "fp32"
                                   : message == ShardMessage::up  ? signature.up
                                                                  : signature.down);
  std::vector<TensorSpec> specs;
  for (const ParameterRange& range : layout.ranges) {
    const Variable& one = signature.parameters[range.parameter];
    specs.push_back({.name = one.name,
                     .count = range.count,
                     .dtype = DType::f32,
                     .codec = message == ShardMessage::whole
                                  ? Codec()
                                  : rules.codec_for(one.name, static_cast<int>(one.shape.size()), one.count()),
                     .first = range.first});
  }
  return specs;
}

std::vector<TensorSpec> buffer_specs(const Signature& signature) {
  std::vector<TensorSpec> specs;
  for (const Variable& one : signature.buffers)
    specs.push_back({.name = one.name, .count = one.count(), .dtype = DType::f32, .codec = {}});
  return specs;
}

}  // namespace gradwire::server
