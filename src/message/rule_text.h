// SPDX-License-Identifier: Apache-2.0
// The text of rules, taken apart before their codecs are known: for callers who know methods that are no codecs of
// messages.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>
#include <vector>

namespace gradwire {

struct RuleText {
  size_t number;  // from 1 on
  std::string_view text, pattern, spec;

  // Calls body(spec). What it refuses is refused with the number and the text of the rule.
  void parse(const std::function<void(std::string_view spec)>& body) const;
};

// A codec alone is one rule with the pattern `*`. Throws Error{usage} where the text is not one of rules.
std::vector<RuleText> rule_texts(std::string_view text);

}  // namespace gradwire
