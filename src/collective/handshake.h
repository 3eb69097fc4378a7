// SPDX-License-Identifier: Apache-2.0
// Ranks agree before data move. The Handshake of a collective holds what must be equal on all ranks, field by field. A
// record of fixed size (a hash and a short text per field) is gathered from all ranks, so ranks that disagree learn
// which rank differs in which field, and both values, before anything of an unexpected size is sent.
//
// A rank that cannot take part (a bad spec, a wrong number of pointers, a step that is still open) says so in its
// record instead of staying away, and the others fail at once rather than by time-out. These errors come at the same
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

struct HandshakeField {
  const char* name;
  std::string text;
};

struct Handshake {
  std::vector<HandshakeField> common;  // the same fields in the same order on every rank: at most kCommonFields
  std::vector<std::vector<HandshakeField>> tensors;  // the same kTensorFields fields for each tensor
  int node = -1;                                     // where this rank runs; ranks need not have the same
  uint64_t hash() const;
};
inline constexpr size_t kCommonFields = 10;
inline constexpr size_t kTensorFields = 4;

// Throws `failure` if this rank has one, Error{mismatch} on every rank if another has, or if ranks disagree. Returns
// the nodes of all ranks.
std::vector<int> agree(Engine& engine, const Handshake& handshake, std::exception_ptr failure);

// The same before each step, with less to send: `agreed` is the hash of what was agreed before.
void agree_step(Engine& engine, uint64_t agreed, uint64_t step, float loss_scale, std::exception_ptr failure);
uint64_t agree_step_bytes(int world);  // that one rank sends to the others

// The course of every collective: prepare (which may fail on this rank alone), agree (which fails on all ranks or on
// none), move the data. Only this rank knows of a failure in the last part, so it poisons the engine: no peer waits in
// vain.
void take_part(Engine& engine, const std::function<void()>& prepare,
               const std::function<void(std::exception_ptr failure)>& agree, const std::function<void()>& move);

}  // namespace gradwire
