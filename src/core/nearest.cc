// SPDX-License-Identifier: Apache-2.0
#include "core/nearest.h"

#include <algorithm>
#include <cstddef>

namespace gradwire {
namespace {

// The optimal string alignment distance, in the usual table of prefixes.
size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> edits(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) edits[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) edits[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      edits[i][j] =
          std::min({edits[i - 1][j] + 1, edits[i][j - 1] + 1, edits[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        edits[i][j] = std::min(edits[i][j], edits[i - 2][j - 2] + 1);
    }
  }
  return edits[a.size()][b.size()];
}

}  // namespace

std::string nearest_name(std::string_view word, const std::vector<std::string>& names) {
  constexpr size_t kLongest = 64;  // the table is quadratic, and no name is longer
  if (word.empty() || word.size() > kLongest) return {};
  std::string best;
  // One edit for every three letters may be wrong, and at least one.
  size_t fewest = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& name : names) {
    const size_t edits = edits_between(word, name);
    if (edits >= fewest) continue;
    fewest = edits;
    best = name;
  }
  return best;
}

}  // namespace gradwire
