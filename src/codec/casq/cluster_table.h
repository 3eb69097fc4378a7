// SPDX-License-Identifier: Apache-2.0
// The table of casq: where its clusters begin and end, and how they get their buckets. It travels in every message.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/define.h"

namespace gradwire {

struct ClusterTable {
  std::vector<float> thresholds;
  // A word per cluster. In tiles these are the clusters in the order in which they get buckets. In mode=paper they are
  // the shares of the clusters in 2^-16.
  std::vector<uint32_t> words;
};

ClusterTable default_clusters(uint32_t bits, bool paper);
// An empty table means the default one. Throws Error{usage, "table"}.
ClusterTable read_clusters(uint32_t bits, bool paper, Table table);
std::vector<uint32_t> words_of(const ClusterTable& table);

// The same order of a tile's clusters, but with the outlier cluster of the other sign in front. A sender with error
// feedback alternates between the two.
//
// The first cluster of the order may use up the whole budget. A message loses little by that, because the outliers of
// the two signs have about the same variance. But the residual of the other sign would grow in every step until the
// next fit. Only outliers need a turn: an element of another cluster that is owed more and more becomes an outlier.
ClusterTable other_sign_first(ClusterTable table);

}  // namespace gradwire
