// SPDX-License-Identifier: Apache-2.0
// The strongest values of a unit, exactly.
#include "codec/body.h"
#include "codec/parameters.h"
#include "codec/topk/cpu.h"

namespace gradwire {

CodecDef codec_topk() {
  return {
      .name = "topk",
      .summary = "the strongest values, exactly, with their places; wants feedback",
      .example = "topk:ratio=0.01",
      .specs = {"topk:ratio=0.3", "topk:ratio=1", "topk:ratio=0.001,mode=paper"},
      .parameters = {real("ratio", "0.01", 1e-6, 1, "share of the values that are kept; at least one per unit"),
                     mode_parameter("what the strongest are chosen among")},
      .scheme =
          [](const Values& v) { return Scheme{.body = Body::own, .unit = unit_of_mode(v), .ratio = v.real("ratio")}; },
      .traits =
          [](const Values& v) {
            return Traits{.lossless = false, .unbiased = false, .feedback = true, .unit = unit_of_mode(v)};
          },
      .unit = &kTopkUnits};
}

}  // namespace gradwire
