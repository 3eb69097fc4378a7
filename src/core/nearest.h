// SPDX-License-Identifier: Apache-2.0
// The known name that a misspelt word most likely means, for error messages: "did you mean qsgd?".
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace gradwire {

// The name with the fewest edits (inserted, dropped, changed or swapped neighbouring letters) between it and `word`.
// Empty if no name is close: a suggestion that shares little with the word would mislead.
std::string nearest_name(std::string_view word, const std::vector<std::string>& names);

}  // namespace gradwire
