// SPDX-License-Identifier: Apache-2.0
// The interface of the codecs that do more than turn each element into a code: topk, casq and fft. Each of them lays
// out the words of its units as it likes, and encodes, checks and decodes them itself. The runners, the layout of a
// message and the registry reach such a codec through its UnitOps and know nothing else about it.
//
// A tensor is cut in tasks, which are independent: the CPU runner hands them to its threads in any order. What a task
// is, a unit or a run of units, is the codec's choice; it should be large against the cost of a call.
#pragma once

#include <cstdint>

#include "device/kernels.h"
#include "device/scheme.h"

namespace gradwire {

struct CudaUnitOps;  // codec/cuda_unit.h

// What is wrong with the units of a task: the field, or null where nothing is, and the unit that has it.
struct UnitProblem {
  const char* field = nullptr;
  uint64_t unit = 0;
};

struct UnitOps {
  // The codes of a tensor stand in front of everything else, block after block, exactly as those of element codecs do.
  // The tensor's words then begin at a row of the checksum, and the runner checks the padding behind the last code.
  bool codes_in_blocks = false;

  uint64_t (*words)(const Scheme& scheme, uint64_t count);  // that a tensor of `count` elements takes in a message
  uint64_t (*tasks)(const Scheme& scheme, uint64_t count);

  // A span is the whole tensor; its `begin` and `end` are not set. encode() adds the words it writes to `check`.
  void (*encode)(const Kernels& kernels, const Span& span, uint64_t task, Scratch& scratch, LaneSums& check);
  UnitProblem (*check)(const Span& span, uint64_t task);
  // Expects units that check() accepts.
  void (*decode)(const Kernels& kernels, const Span& span, uint64_t task, Scratch& scratch);

  const CudaUnitOps* cuda = nullptr;  // null: the codec, or this build, has no kernels
};

}  // namespace gradwire
