// SPDX-License-Identifier: Apache-2.0
// A codec is named by one string everywhere: in C++, on the command line, in messages, logs and benchmark rows.
//
//   Codec codec = Codec::parse("qsgd:bits=4");
//   codec.str()                // "qsgd:bits=4,bucket=1024,norm=max,rounding=random": canonical, every parameter but
//                              // those that came to a codec later (docs/wire-format.md) and have their defaults
//   codec.bytes(1'000'000)     // what a tensor of a million elements takes in a message
//
// Some codecs learn: levels, clusters, a number of bits. What was learned is a small table that is part of the codec:
// it travels in the message beside the spec, so a decoder needs nothing else. A codec without a table uses defaults of
// its own. Fitting to one tensor, and learning step by step with other ranks: learn.h.
//
// The size depends on (codec, count) alone, never on the values, so sizes are known before any data exist.
//
// Threads: a Codec never changes, but by assignment. Any number of threads may use one at once, its copies are
// independent of it, and the functions without a Codec (parse, parse_wire, codecs) may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gradwire {

struct ParameterInfo {
  std::string name;
  std::string fallback;  // the default value
  std::string allowed;   // in words, e.g. "an integer from 2 to 8"
  std::string meaning;
  bool learning = false;  // says how the codec learns: it is no part of a message
};

struct CodecInfo {
  std::string name;
  std::string summary;
  std::string example;             // what a user would write
  std::vector<std::string> specs;  // worth testing: the name alone, the example and more; learning parameters aside
  std::vector<ParameterInfo> parameters;
};

// What the rest of the library may rely on.
struct Traits {
  bool lossless;        // decode(encode(x)) == x for every finite f32
  bool unbiased;        // E[decode(encode(x))] == x
  bool feedback;        // error feedback is on unless a user says otherwise
  uint64_t unit;        // elements that share scales and a not-a-number marker; 0: the whole tensor
  bool learns = false;  // has a table that can be fitted to data
  // Error feedback is on where workers exchange Adam's momentum, also where `feedback` is not set: so few bits that
  // Adam feels the noise of unbiased rounding, and an error that feedback keeps bounded.
  bool momentum = false;
};

class Codec {
 public:
  Codec();                                    // fp32
  static Codec parse(std::string_view spec);  // throws Error{usage} naming the field, the value and what is allowed
  std::string str() const;                    // parse(str()) == *this

  // The spec as a message carries it: the name and the parameters that say how a step is encoded, without those that
  // say how the sender learns. A codec can gain a learning option without a change of its messages. parse_wire() is the
  // inverse, with the defaults of the learning parameters; it refuses a text that names one of them.
  std::string wire_spec() const;
  static Codec parse_wire(std::string_view spec);
  const std::string& name() const;
  Traits traits() const;
  uint64_t bytes(uint64_t count) const;  // body bytes of one tensor in a message (alignment not counted)
  bool has(std::string_view parameter) const;
  std::string get(std::string_view parameter) const;
  Codec with(std::string_view parameter, std::string_view value) const;  // the table is left behind
  std::span<const uint32_t> table() const;                               // what was learned; empty: the defaults
  Codec fitted(std::span<const uint32_t> table) const;     // throws Error{usage, "table"} naming what is wrong with it
  std::vector<std::string> describe() const;               // the table in words, for people; empty without one
  friend bool operator==(const Codec& a, const Codec& b);  // spec and table

 private:
  friend struct CodecAccess;  // for the library's own functions
  struct Impl;
  explicit Codec(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

const std::vector<CodecInfo>& codecs();  // the registry, in the order of codecs.def

}  // namespace gradwire
