// SPDX-License-Identifier: Apache-2.0
// Two kinds of error. The world failed (a bad argument, a bad frame, a peer that died, a full disk): the
// library throws `Error`, whose message names the field, the value and what was expected. We failed (a broken
// invariant): GW_CHECK throws std::logic_error. The library never prints and never exits.
#pragma once

#include <stdexcept>
#include <string>

namespace gradwire {

enum class ErrorKind {
  usage,        // an argument or a spec string is wrong
  frame,        // a message is truncated, altered, of another version, or lies
  mismatch,     // ranks disagree about what they are about to do
  engine,       // a peer stalled or died; the engine is poisoned
  io,           // a file could not be read or written
  unsupported,  // this build or this machine cannot do it
  device,       // a device call failed
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, std::string field = {}, int rank = -1)
      : std::runtime_error(message), kind_(kind), field_(std::move(field)), rank_(rank) {}

  ErrorKind kind() const { return kind_; }
  const std::string& field() const { return field_; }  // the field at fault, e.g. "bits" or "body_check"
  int rank() const { return rank_; }                   // the rank at fault, or -1

 private:
  ErrorKind kind_;
  std::string field_;
  int rank_;
};

}  // namespace gradwire

#define GW_STRINGIFY_(x) #x
#define GW_STRINGIFY(x) GW_STRINGIFY_(x)
#define GW_CHECK(condition)                                                                                           \
  do {                                                                                                                \
    if (!(condition))                                                                                                 \
      throw std::logic_error("gradwire: broken invariant: " #condition " (" __FILE__ ":" GW_STRINGIFY(__LINE__) ")"); \
  } while (false)
