// SPDX-License-Identifier: Apache-2.0
// The strongest values of a unit: exactly, with their indices (Aji and Heafield, 2017), or packed. docs/algorithms.md
// says what packing costs and gains.
#include <fmt/format.h>

#include "codec/body.h"
#include "codec/parameters.h"
#include "codec/topk/cpu.h"
#include "codec/topk/layout.h"

namespace gradwire {
namespace {

uint32_t places_of(const Values& v) {
  const std::string& index = v.choice("index");
  return index == "coded" ? kCodedPlaces : index == "bitmap" ? kBitmapPlaces : kRawPlaces;
}

Scheme scheme(const Values& v) {
  const Scheme s{.body = Body::own,
                 .bits = static_cast<uint8_t>(v.integer("bits")),
                 .unit = unit_of_mode(v),
                 .ratio = v.real("ratio"),
                 .steps = places_of(v)};
  // A whole tensor is encoded block by block, in passes that keep nothing. Levels would take further passes.
  if (topk_packed(s) && s.unit == 0) {
    const char* field = s.bits != 32 ? "bits" : "index";
    throw Error(ErrorKind::usage,
                fmt::format("{} is {}; with mode=paper only bits=32 with index=raw is allowed", field, v.choice(field)),
                field);
  }
  return s;
}

}  // namespace

CodecDef codec_topk() {
  return {
      .name = "topk",
      .summary = "the strongest values with their places, exactly or packed in few bits; wants feedback",
      .example = "topk:ratio=0.01",
      .specs = {"topk:ratio=0.3", "topk:ratio=1", "topk:ratio=0.001,mode=paper", "topk:ratio=0.03,bits=2",
                "topk:ratio=0.3,bits=5,index=bitmap", "topk:ratio=0.02,bits=16"},
      .parameters = {real("ratio", "0.01", 1e-6, 1, "share of the values that are kept; at least one per unit"),
                     mode_parameter("what the strongest are chosen among"),
                     later(choice("bits", {"32", "16", "8", "7", "6", "5", "4", "3", "2", "1"},
                                  "of a value: f32, bf16, or a sign and a level fitted to the tile")),
                     later(choice("index", {"raw", "coded", "bitmap"},
                                  "places: 16 bits each, Elias-Fano, or a bit an element; coded by default where bits "
                                  "is given and below 32"))},
      .defaults =
          [](Values& v, const std::set<std::string>& given) {
            if (!given.contains("index") && v.choice("bits") != "32") v.text["index"] = "coded";
          },
      .scheme = scheme,
      .traits =
          [](const Values& v) {
            return Traits{.lossless = false, .unbiased = false, .feedback = true, .unit = unit_of_mode(v)};
          },
      .unit = &kTopkUnits};
}

}  // namespace gradwire
