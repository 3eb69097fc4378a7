// SPDX-License-Identifier: Apache-2.0
// Reading and writing .npy: see npy.h. The header is a dictionary literal; the small reader below understands exactly
// the literals that NumPy writes there (strings, True and False, tuples of integers) and refuses everything else.
#include "codec/npy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cctype>
#include <cstring>
#include <optional>
#include <string_view>

#include "core/check.h"
#include "gradwire/error.h"

namespace gradwire::app {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";

[[noreturn]] void bad(const std::string& path, const std::string& field, const std::string& what) {
  throw Error(ErrorKind::frame, fmt::format("{}: .npy {}: {}", path, field, what), field);
}

class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& path) : text_(text), path_(path) {}

  bool take(char wanted) {
    skip_spaces();
    if (at_ >= text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }
  void need(char wanted) {
    if (!take(wanted)) bad(path_, "header", fmt::format("expected '{}' at byte {} of the dictionary", wanted, at_));
  }
  std::string string() {
    skip_spaces();
    if (at_ >= text_.size() || (text_[at_] != '\'' && text_[at_] != '"'))
      bad(path_, "header", fmt::format("expected a string at byte {} of the dictionary", at_));
    const char quote = text_[at_++];
    const size_t end = text_.find(quote, at_);
    if (end == std::string_view::npos) bad(path_, "header", "a string has no end");
    std::string value(text_.substr(at_, end - at_));
    at_ = end + 1;
    return value;
  }
  bool boolean(const char* field) {
    skip_spaces();
    for (bool value : {true, false}) {
      const std::string_view word = value ? "True" : "False";
      if (text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        return value;
      }
    }
    bad(path_, field, "is not True or False");
  }
  std::vector<uint64_t> tuple(const char* field) {
    need('(');
    std::vector<uint64_t> values;
    while (!take(')')) {
      skip_spaces();
      uint64_t value = 0;
      const size_t begin = at_;
      for (; at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_])); ++at_)
        if (__builtin_mul_overflow(value, uint64_t{10}, &value) ||
            __builtin_add_overflow(value, static_cast<uint64_t>(text_[at_] - '0'), &value))
          bad(path_, field, "holds a number that does not fit 64 bits");
      if (at_ == begin) bad(path_, field, "is not a tuple of integers");
      values.push_back(value);
      if (!take(',')) {
        need(')');
        break;
      }
    }
    return values;
  }
  void end() {
    skip_spaces();
    if (at_ != text_.size()) bad(path_, "header", "has something after the dictionary");
  }

 private:
  void skip_spaces() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
  }
  std::string_view text_;
  const std::string& path_;
  size_t at_ = 0;
};

}  // namespace

bool looks_like_npy(std::span<const std::byte> file) {
  return file.size() >= kMagic.size() && std::memcmp(file.data(), kMagic.data(), kMagic.size()) == 0;
}

void expect_npy(std::span<const std::byte> first, const std::string& path) {
  if (!looks_like_npy(first)) bad(path, "magic", "the file does not begin with \\x93NUMPY");
}

NpyArray parse_npy(std::span<const std::byte> file, const std::string& path) {
  const auto byte_at = [&](size_t i) { return static_cast<uint32_t>(file[i]); };
  expect_npy(file, path);
  if (file.size() < 10) bad(path, "header", fmt::format("the file ends after {} bytes", file.size()));
  const uint32_t version = byte_at(6);
  if (version < 1 || version > 3) bad(path, "version", fmt::format("{}.{}, expected 1, 2 or 3", version, byte_at(7)));
  const size_t start = version == 1 ? 10 : 12;
  if (file.size() < start) bad(path, "header", fmt::format("the file ends after {} bytes", file.size()));
  uint64_t header_bytes = byte_at(8) | byte_at(9) << 8;
  if (version > 1) header_bytes |= static_cast<uint64_t>(byte_at(10) << 16 | byte_at(11) << 24);
  if (header_bytes > file.size() - start)
    bad(path, "header", fmt::format("says {} bytes, the file has {}", header_bytes, file.size() - start));

  HeaderReader reader({reinterpret_cast<const char*>(file.data()) + start, static_cast<size_t>(header_bytes)}, path);
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<uint64_t>> shape;
  reader.need('{');
  while (!reader.take('}')) {
    const std::string key = reader.string();
    reader.need(':');
    if (key == "descr") {
      if (reader.take('['))
        throw Error(ErrorKind::usage, path + ": .npy descr: a record array, allowed is <f4 or <f2", "descr");
      descr = reader.string();
    } else if (key == "fortran_order") {
      fortran_order = reader.boolean("fortran_order");
    } else if (key == "shape") {
      shape = reader.tuple("shape");
    } else {
      bad(path, "header", fmt::format("unknown key '{}'", key));
    }
    if (!reader.take(',')) {
      reader.need('}');
      break;
    }
  }
  reader.end();
  if (!descr) bad(path, "descr", "is missing");
  if (!fortran_order) bad(path, "fortran_order", "is missing");
  if (!shape) bad(path, "shape", "is missing");

  NpyArray array;
  if (*descr == "<f4") {
    array.dtype = DType::f32;
  } else if (*descr == "<f2") {
    array.dtype = DType::f16;
  } else {
    throw Error(ErrorKind::usage,
                fmt::format("{}: .npy descr: {}, allowed is <f4 (float32) or <f2 (float16); in NumPy: a.astype('<f4')",
                            path, *descr),
                "descr");
  }
  array.fortran_order = *fortran_order;
  array.shape = *shape;
  array.count = 1;
  for (uint64_t extent : array.shape)
    if (__builtin_mul_overflow(array.count, extent, &array.count)) bad(path, "shape", "has more than 2^64 elements");
  array.data = file.subspan(start + static_cast<size_t>(header_bytes));
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(array.count, uint64_t{bytes_of(array.dtype)}, &bytes) || bytes != array.data.size())
    bad(path, "shape",
        fmt::format("{} elements of {} bytes, but the file holds {} bytes of data", array.count, bytes_of(array.dtype),
                    array.data.size()));
  return array;
}

std::vector<std::byte> in_c_order(const NpyArray& array) {
  GW_CHECK(array.fortran_order);
  const size_t width = bytes_of(array.dtype), dims = array.shape.size();
  std::vector<uint64_t> index(dims, 0), stride(dims, width);
  for (size_t d = 1; d < dims; ++d) stride[d] = stride[d - 1] * array.shape[d - 1];
  std::vector<std::byte> out(array.data.size());
  uint64_t from = 0;  // byte of the element at `index`
  for (uint64_t i = 0; i < array.count; ++i) {
    std::memcpy(out.data() + i * width, array.data.data() + from, width);
    // The next index in C order: the last one counts up, and carries to the one before it.
    for (size_t d = dims; d-- > 0;) {
      from += stride[d];
      if (++index[d] < array.shape[d]) break;
      from -= stride[d] * array.shape[d];
      index[d] = 0;
    }
  }
  return out;
}

std::vector<std::byte> npy_header(DType dtype, std::span<const uint64_t> shape) {
  GW_CHECK(dtype != DType::bf16);  // NumPy has no name for it
  std::string dictionary =
      fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}", dtype == DType::f32 ? "<f4" : "<f2",
                  fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  // The format asks for elements at a multiple of 64 bytes and a newline before them.
  constexpr size_t kStart = 10;
  dictionary.append(63 - (kStart + dictionary.size()) % 64, ' ');
  dictionary += '\n';
  std::string header(kMagic);
  header += {'\x01', '\x00', static_cast<char>(dictionary.size() & 0xff), static_cast<char>(dictionary.size() >> 8)};
  header += dictionary;
  const auto* bytes = reinterpret_cast<const std::byte*>(header.data());
  return {bytes, bytes + header.size()};
}

}  // namespace gradwire::app
