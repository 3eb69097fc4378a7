// SPDX-License-Identifier: Apache-2.0
// What the fuzz targets share: promises, input that is read piece by piece, and JSON texts of any depth.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace gradwire::fuzz {

// A broken promise is a finding.
inline void promise(bool kept) {
  if (!kept) __builtin_trap();
}

// Reads one piece of input after another; zeros when it is used up.
struct Source {
  const uint8_t* data;
  size_t size;

  template <class T>
  T next() {
    T value{};
    const size_t n = std::min(size, sizeof value);
    if (n > 0) std::memcpy(&value, data, n);
    skip(n);
    return value;
  }
  // At most so many bytes.
  std::string text(size_t length) {
    const size_t n = std::min(size, length);
    std::string bytes(reinterpret_cast<const char*>(data), n);
    skip(n);
    return bytes;
  }
  std::string rest() { return text(size); }
  void skip(size_t n) {
    data += n;
    size -= n;
  }
};

// A text with fewer than `gone_most` bytes replaced by fewer than `new_most`.
inline std::string altered(Source& source, std::string text, size_t gone_most = 16, size_t new_most = 24) {
  const size_t at = source.next<uint16_t>() % (text.size() + 1);
  const size_t gone = std::min<size_t>(source.next<uint8_t>() % gone_most, text.size() - at);
  return text.replace(at, gone, source.text(source.next<uint8_t>() % new_most));
}

// An object one of whose values is nested as deep as the input says, up to 260,000: no mutation makes a text as long as
// that, and what recurses over a value needs one to overflow the stack. The other bytes choose the key, the brackets
// and what is inside.
inline std::string nested_json(Source& source) {
  static constexpr const char* kKeys[] = {"id",       "name",    "signature", "parameters", "loss",
                                          "versions", "durable", "left",      "shape",      "codec",
                                          "epochs",   "workers", "sequence",  "step",       "x"};
  const char* key = kKeys[source.next<uint8_t>() % (sizeof kKeys / sizeof *kKeys)];
  const uint8_t how = source.next<uint8_t>();
  size_t depth = source.next<uint16_t>() % 256;
  if (how % 16 == 0) depth *= 1024;
  const std::string inside = source.text(source.next<uint8_t>() % 16);
  std::string text = std::string("{\"") + key + "\":";
  const bool objects = how & 32;
  text.reserve(text.size() + depth * (objects ? 6 : 2) + 64);
  for (size_t i = 0; i < depth; ++i) text += objects ? "{\"a\":" : "[";
  text += inside.empty() ? "1" : inside;
  if (!(how & 64))
    for (size_t i = 0; i < depth; ++i) text += objects ? "}" : "]";
  return text + "}";
}

}  // namespace gradwire::fuzz
