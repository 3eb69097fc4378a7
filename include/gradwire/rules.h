// SPDX-License-Identifier: Apache-2.0
// Rules choose a codec for every tensor of a model:
//
//   const Rules rules = Rules::parse("*.bias=fp32;1d=fp32;<1024=fp32;*=qsgd:bits=4");
//   const Codec codec = rules.codec_for("layer.weight", 2, 1'000'000);
//
// The first rule that matches wins. `1d` matches tensors with at most one dimension, `2d` those with two or more,
// `<COUNT` those with fewer elements, and anything else is a glob over the name (`*`: any characters, `?`: any one).
// The last rule must be `*`. A plain spec such as "qsgd:bits=4" is one rule for all tensors. Wherever the library takes
// a codec for a list of tensors, it takes rules.
//
// Threads: a const Rules may be used by any number of threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/codec.h"

namespace gradwire {

class Rules {
 public:
  static Rules parse(std::string_view text);  // throws Error{usage} naming what is wrong
  std::string str() const;                    // canonical: equal rules have equal texts
  Rules nearest() const;                      // with codecs that round to nearest, where they can
  Codec codec_for(std::string_view name, int dimensions, uint64_t count) const;
  size_t number_for(std::string_view name, int dimensions, uint64_t count) const;  // of the rule that decides, from 0

 private:
  struct Rule {
    std::string pattern;
    Codec codec;
    uint64_t below;  // of a rule `<COUNT`; otherwise 0
  };
  std::vector<Rule> rules_;
};

}  // namespace gradwire
