// SPDX-License-Identifier: Apache-2.0
// Casts: fp32, fp16, bf16. Each element stands for itself.
#include "codec/body.h"
#include "codec/define.h"

namespace gradwire {
namespace {

CodecDef cast(const std::string& name, const std::string& summary, Body body, uint8_t bits, bool lossless) {
  return {.name = name,
          .summary = summary,
          .example = name,
          .scheme = [=](const Values&) { return Scheme{.body = body, .bits = bits}; },
          .traits =
              [=](const Values&) {
                return Traits{.lossless = lossless, .unbiased = lossless, .feedback = false, .unit = 1};
              }};
}

}  // namespace

CodecDef codec_fp32() { return cast("fp32", "full precision: every finite value exactly", Body::cast32, 32, true); }
CodecDef codec_fp16() { return cast("fp16", "IEEE half precision, rounded to nearest even", Body::cast16, 16, false); }
CodecDef codec_bf16() { return cast("bf16", "bfloat16, rounded to nearest even", Body::castb16, 16, false); }

}  // namespace gradwire
