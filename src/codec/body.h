// SPDX-License-Identifier: Apache-2.0
// The bodies a Scheme may name. An element body makes one code of one value; its file is codec/<body>-inl.h, a struct
// of static templates over a lane L (device/lane.h) that is compiled for every vector target, for the reference loop
// and for CUDA. It has
//
//   encode<L, kTiny>(x, params, rnd)   the code of a value. `rnd` holds 16 random bits per lane, or 0x8000 to round
//                                      to nearest; kTiny: the unit may be so small that values must be lifted by pre
//   decode<L>(code, params)            the value of a code
//   check<L>(seen, code), bad(seen, scheme)   fold codes into a word, and whether any of them no encoder writes
//   make_scales, scales_valid          from statistics to scales: codec/stats.h
//   make_params(scheme, scales)        from scales to what encode and decode read
//
// and says what drivers would otherwise have to ask:
//
//   kCodeBits      bits of a code, packed as it is made; 0: the scheme's, and packed after a block of codes is made
//   kRandom        encode reads rnd
//   kLifts         pre may differ from 1
//   kClips         limit is a bound of values, so that it is lifted with them
//   kTwoParams     decode reads nothing but a and b
//   kTableFloats   floats of the table that encode and decode look up; 0: none
#pragma once

#include <stdexcept>
#include <string>

#include "codec/rangefloat/range_float.h"
#include "device/scheme.h"

namespace gradwire {

enum class Body : uint8_t {
#define GW_ELEMENT(name, group) name,
#include "codec/bodies.def"
#undef GW_ELEMENT
  own,  // none of these: the codec has units of its own (codec/unit.h)
};

// A scheme that no dispatch knows is a mistake in the library, never in its input: it must not run as another body.
[[noreturn]] inline void refuse_body(const Scheme& s) {
  throw std::logic_error("no element body " + std::to_string(static_cast<int>(s.body)) + " with " +
                         std::to_string(static_cast<int>(s.bits)) + " bits");
}

}  // namespace gradwire
