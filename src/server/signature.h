// SPDX-License-Identifier: Apache-2.0
// What all workers of a server must agree on: names and shapes of the parameters and buffers, and how they travel. The
// first worker (or a checkpoint) brings it; a joiner with another one is told the first difference. The cut into parts
// follows from it alone, so both sides know it without sending it.
//
// A part is what moves, closes, is acknowledged and saved as one: some whole tensors, or a stretch of a large one.
// Parts are independent of each other, so one goes down while the next comes up.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "gradwire/plan.h"
#include "gradwire/rules.h"

namespace gradwire::server {

struct Variable {
  std::string name;
  std::vector<int64_t> shape;
  uint64_t count() const;
};

struct Signature {
  std::vector<Variable> parameters, buffers;
  std::string up = "loggrid:k=2", down = "unigrid:bits=8";  // specs or rules
  bool sends_updates = false;  // down go quantised changes of the weights, with feedback, instead of quantised weights
  bool pools = false;          // workers share their second moment
  uint64_t seed = 0;           // of random rounding on the way down; the first worker's counts
  std::string model;           // for people

  nlohmann::json json() const;
  static Signature parse(const nlohmann::json& text);  // Error{frame, "signature"}: hostile input
  // In words, what is different in `other`; empty if nothing is.
  std::string difference(const Signature& other) const;
  uint64_t elements() const;
};

struct Limits {
  uint64_t max_elements = uint64_t{1} << 33;
  uint64_t max_tensors = 100000;
};
void check_limits(const Signature& signature, const Limits& limits);  // Error{usage, "elements" | "tensors"}

// A stretch of a parameter.
struct Piece {
  size_t parameter;
  uint64_t first, count;
};

enum class Role : uint8_t { weights, pool };

struct Cut {
  Role role;
  std::vector<Piece> pieces;
  uint64_t elements() const;
  std::vector<float> gather(std::span<const std::span<const float>> parameters) const;  // its pieces, one after another
};

// First the parts of the weights, then, if workers pool their second moments, those of the pool, cut alike.
std::vector<Cut> cut_parts(const Signature& signature, uint64_t part_elements = uint64_t{1} << 20);

enum class Way { up, down, whole };  // whole: fp32
std::vector<TensorSpec> specs_of(const Signature& signature, const Cut& cut, Way way);
std::vector<TensorSpec> buffer_specs(const Signature& signature);  // by fp32

}  // namespace gradwire::server
