// SPDX-License-Identifier: Apache-2.0
// Where an argument or a message is wrong, a peer dies or a disk is full, the library throws `Error`, whose message
// names the field, the value and what was expected. A std::logic_error is a mistake in the library itself. The library
// never prints and never exits.
#pragma once

#include <stdexcept>
#include <string>

namespace gradwire {

enum class ErrorKind {
  usage,        // an argument or a spec string is wrong
  frame,        // a message is truncated, altered, of another version, or malformed
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
