// SPDX-License-Identifier: Apache-2.0
// Which tensors of a reduction travel as factors (codec/lowrank/lowrank.h), and what the coding core sees instead of
// them: the other tensors, and behind these the two factors of every such matrix as tensors of their own.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "codec/lowrank/lowrank.h"
#include "gradwire/collective.h"

namespace gradwire {

struct FactoredMatrix {
  size_t tensor;  // in the caller's list
  std::string name;
  DType dtype;
  uint64_t rows, columns;
  LowRank codec;
  size_t p, q;  // of its factors, in the core's list; p has a row for each row of the matrix, q for each column
};

struct FactorPlan {
  std::vector<FactoredMatrix> matrices;
  std::vector<NamedTensor> tensors;  // the core's list
  std::vector<size_t> others;        // per tensor at the front of it: its index in the caller's list
  std::string up;                    // rules for the core's list
  std::string without;               // the caller's rules with fp32 in place of lowrank
  std::string text;                  // the caller's rules, canonical

  // Empty where the rules choose no lowrank. What a tensor or an option makes impossible is refused: Error{usage} or
  // Error{unsupported}.
  static std::optional<FactorPlan> of(const std::vector<NamedTensor>& tensors, const ReduceOptions& options);
};

// Rules with fp32 in place of every lowrank, for those who ask what is sent of tensors that are not factored. Rules
// without lowrank stay as they are.
std::string without_lowrank(const std::string& rules);

// Equal rules have equal texts, as those of Rules::str().
std::string canonical_rules(const std::string& rules);

}  // namespace gradwire
