// SPDX-License-Identifier: Apache-2.0
// Ranks agree before data move. The Terms of a collective are what must be alike on all ranks, field by field; a
// fixed-size record of them (a hash and a short text per field) is gathered from everybody, so ranks that disagree
// learn who differs about what, and both values, while nothing of another size than expected was ever sent.
//
// A rank that cannot take part (a bad spec, a wrong number of pointers, a residual still open) says so in its record
// instead of staying away, and the others fail at once rather than by time-out. These errors come at the same
// place on all ranks, so the engine stays usable.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "gradwire/collective.h"

namespace gradwire {

struct Term {
  const char* field;
  std::string text;
};

struct Terms {
  std::vector<Term> common;                // the same fields in the same order on every rank: at most kCommonTerms
  std::vector<std::vector<Term>> tensors;  // the same kTensorTerms fields for each tensor
  uint64_t hash() const;
};
inline constexpr size_t kCommonTerms = 10;
inline constexpr size_t kTensorTerms = 4;

// Throws `failure` if this rank has one, Error{mismatch} on every rank if another has, or if ranks disagree.
void agree(Engine& engine, const Terms& terms, std::exception_ptr failure);

// The same before each step, with less to send: terms stands for the hash of what was agreed.
void agree_step(Engine& engine, uint64_t terms, uint64_t step, float loss_scale, std::exception_ptr failure);
uint64_t agree_step_bytes(int world);  // that one rank sends to the others

// The course of every collective: prepare (may fail on this rank alone), agree (fails alike on all), move the data.
// What fails in the last part is known here only: the engine is poisoned with it, so that no peer waits in vain.
void take_part(Engine& engine, const std::function<void()>& prepare,
               const std::function<void(std::exception_ptr failure)>& agree, const std::function<void()>& move);

}  // namespace gradwire
