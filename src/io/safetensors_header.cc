// SPDX-License-Identifier: Apache-2.0
// The grammar is small and fixed: an object of tensors, each an object of exactly dtype, shape and data_offsets, and
// one object of texts. SafetensorsHeaderReader is a state machine over it; whatever does not fit a state is refused at
// once, so depth, types and duplicate names need no check of their own afterwards.
#include "io/safetensors_header.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "gradwire/error.h"

namespace gradwire::io {
namespace {

using nlohmann::json;

constexpr std::string_view kMetadata = "__metadata__";

struct KnownDtype {
  std::string_view name;
  size_t bytes;
};
constexpr std::array kDtypes = {KnownDtype{"BOOL", 1},    KnownDtype{"U8", 1},      KnownDtype{"I8", 1},
                                KnownDtype{"F8_E5M2", 1}, KnownDtype{"F8_E4M3", 1}, KnownDtype{"F8_E8M0", 1},
                                KnownDtype{"I16", 2},     KnownDtype{"U16", 2},     KnownDtype{"F16", 2},
                                KnownDtype{"BF16", 2},    KnownDtype{"I32", 4},     KnownDtype{"U32", 4},
                                KnownDtype{"F32", 4},     KnownDtype{"I64", 8},     KnownDtype{"U64", 8},
                                KnownDtype{"F64", 8},     KnownDtype{"C64", 8}};

class SafetensorsHeaderReader final : public nlohmann::json_sax<json> {
 public:
  explicit SafetensorsHeaderReader(const std::string& path) : path_(path) {}

  Header take() { return std::move(header_); }

  [[noreturn]] void refuse(const char* field, const std::string& why) const {
    throw Error(ErrorKind::frame, fmt::format("{}: {}: {}", path_, field, why), field);
  }
  [[noreturn]] void refuse_tensor(const StoredTensor& tensor, const char* field, const std::string& why) const {
    refuse(field, fmt::format("of {} {}", shown(tensor.name), why));
  }

  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override { unexpected("a number that is no integer below 2^64"); }
  bool binary(binary_t&) override { unexpected("binary"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (state_ == HeaderState::shape) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
        refuse_tensor(tensor(), "shape", fmt::format("has {}; at most 2^63 - 1 is allowed", value));
      if (tensor().shape.size() == kMaxDimensions)
        refuse_tensor(tensor(), "shape", fmt::format("has more than {} dimensions", kMaxDimensions));
      tensor().shape.push_back(static_cast<int64_t>(value));
    } else if (state_ == HeaderState::offsets) {
      if (offset_count_ == 2) refuse_tensor(tensor(), "data_offsets", "has more than 2 numbers");
      offsets_[offset_count_++] = value;
    } else {
      unexpected("a number");
    }
    return true;
  }

  bool string(string_t& value) override {
    if (state_ == HeaderState::metadata) {
      header_.metadata[key_] = std::move(value);
    } else if (state_ == HeaderState::tensor && key_ == "dtype") {
      if (element_bytes(value) == 0)
        refuse_tensor(tensor(), "dtype", fmt::format("is {}; this build knows {}", shown(value), known_dtypes()));
      tensor().dtype = std::move(value);
    } else {
      unexpected("a text");
    }
    return true;
  }

  bool start_object(size_t) override {
    if (state_ == HeaderState::outside) {
      state_ = HeaderState::header;
    } else if (state_ == HeaderState::header && key_ == kMetadata) {
      state_ = HeaderState::metadata;
    } else if (state_ == HeaderState::header) {
      state_ = HeaderState::tensor;
      header_.tensors.emplace_back().name = key_;
      has_dtype_ = has_shape_ = has_offsets_ = false;
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(string_t& value) override {
    key_ = std::move(value);
    if (state_ == HeaderState::header) {
      if (!names_.insert(key_).second) refuse("name", fmt::format("{} stands twice in the header", shown(key_)));
    } else if (state_ == HeaderState::metadata) {
      if (!header_.metadata.try_emplace(key_).second)
        refuse("__metadata__", fmt::format("{} stands twice", shown(key_)));
    } else {
      bool* seen = key_ == "dtype" ? &has_dtype_ : key_ == "shape" ? &has_shape_ : &has_offsets_;
      if (seen == &has_offsets_ && key_ != "data_offsets")
        refuse_tensor(tensor(), "header",
                      fmt::format("has {}; allowed are dtype, shape and data_offsets", shown(key_)));
      if (std::exchange(*seen, true)) refuse_tensor(tensor(), "header", fmt::format("has {} twice", shown(key_)));
    }
    return true;
  }

  bool end_object() override {
    if (state_ == HeaderState::tensor) finish_tensor();
    state_ = state_ == HeaderState::header ? HeaderState::outside : HeaderState::header;
    return true;
  }

  bool start_array(size_t) override {
    if (state_ == HeaderState::tensor && key_ == "shape") {
      state_ = HeaderState::shape;
    } else if (state_ == HeaderState::tensor && key_ == "data_offsets") {
      state_ = HeaderState::offsets;
      offset_count_ = 0;
    } else {
      unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    if (state_ == HeaderState::offsets && offset_count_ != 2)
      refuse_tensor(tensor(), "data_offsets", fmt::format("has {} numbers; 2 are expected", offset_count_));
    state_ = HeaderState::tensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    refuse("header", fmt::format("is no JSON from byte {} on", position));
  }

 private:
  enum class HeaderState { outside, header, metadata, tensor, shape, offsets };

  StoredTensor& tensor() { return header_.tensors.back(); }

  [[noreturn]] void unexpected(const char* what) {
    switch (state_) {
      case HeaderState::outside:
        refuse("header", fmt::format("is {}; an object is expected", what));
      case HeaderState::header:
        refuse(key_ == kMetadata ? "__metadata__" : "header",
               fmt::format("{} is {}; an object is expected", shown(key_), what));
      case HeaderState::metadata:
        refuse("__metadata__", fmt::format("{} is {}; a text is expected", shown(key_), what));
      case HeaderState::tensor:
        refuse_tensor(tensor(),
                      key_ == "dtype"   ? "dtype"
                      : key_ == "shape" ? "shape"
                                        : "data_offsets",
                      fmt::format("is {}; {} is expected", what, key_ == "dtype" ? "a text" : "an array"));
      case HeaderState::shape:
        refuse_tensor(tensor(), "shape", fmt::format("has {}; numbers from 0 are expected", what));
      case HeaderState::offsets:
        break;
    }
    refuse_tensor(tensor(), "data_offsets", fmt::format("has {}; numbers from 0 are expected", what));
  }

  void finish_tensor() {
    StoredTensor& t = tensor();
    if (!has_dtype_) refuse_tensor(t, "dtype", "is missing");
    if (!has_shape_) refuse_tensor(t, "shape", "is missing");
    if (!has_offsets_) refuse_tensor(t, "data_offsets", "is missing");
    if (!tensor_bytes(t.shape, element_bytes(t.dtype), t.bytes))
      refuse_tensor(t, "shape", fmt::format("[{}] has 2^63 bytes or more", fmt::join(t.shape, ", ")));
    if (offsets_[0] > offsets_[1] || offsets_[1] - offsets_[0] != t.bytes)
      refuse_tensor(t, "data_offsets",
                    fmt::format("is [{}, {}]; {} [{}] takes {} bytes", offsets_[0], offsets_[1], t.dtype,
                                fmt::join(t.shape, ", "), t.bytes));
    t.first = offsets_[0];
  }

  static std::string known_dtypes() {
    std::vector<std::string_view> names;
    for (const KnownDtype& known : kDtypes) names.push_back(known.name);
    return fmt::format("{}", fmt::join(names, " "));
  }

  const std::string& path_;
  Header header_;
  HeaderState state_ = HeaderState::outside;
  std::string key_;
  std::unordered_set<std::string> names_;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  uint64_t offsets_[2] = {};
  size_t offset_count_ = 0;
};

// JSON's own escapes, so that the text is one that parse_header gives back.
std::string json_text(const std::string& path, const std::string& value, const char* field) {
  try {
    return json(value).dump();
  } catch (const json::exception&) {
    throw Error(ErrorKind::usage, fmt::format("{}: {}: {} is not UTF-8", path, field, shown(value)), field);
  }
}

}  // namespace

size_t element_bytes(std::string_view dtype) {
  for (const KnownDtype& known : kDtypes)
    if (known.name == dtype) return known.bytes;
  return 0;
}

std::string shown(std::string_view name) {
  constexpr size_t kShown = 100;
  const std::string cut(name.substr(0, kShown));
  return json(cut).dump(-1, ' ', false, json::error_handler_t::replace) + (name.size() > kShown ? "..." : "");
}

bool tensor_bytes(std::span<const int64_t> shape, size_t element_bytes, uint64_t& bytes) {
  constexpr uint64_t kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  uint64_t product = element_bytes;
  bool empty = false;
  for (const int64_t dimension : shape) {
    if (dimension < 0) return false;
    if (dimension == 0) {
      empty = true;
      continue;  // a reader that multiplies in another order must not overflow either
    }
    if (product > kMost / static_cast<uint64_t>(dimension)) return false;
    product *= static_cast<uint64_t>(dimension);
  }
  bytes = empty ? 0 : product;
  return true;
}

Header parse_header(const std::string& path, std::string_view text, uint64_t data_bytes) {
  SafetensorsHeaderReader reader(path);
  if (text.empty() || text.front() != '{') reader.refuse("header", "does not begin with {");
  // To the JSON library a zero is the end of the text; what stands behind it would go unread.
  if (const size_t zero = text.find('\0'); zero != text.npos)
    reader.refuse("header", fmt::format("has a zero byte at {}", zero));
  json::sax_parse(text.begin(), text.end(), &reader);
  Header header = reader.take();

  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::pair(a.first, a.bytes) < std::pair(b.first, b.bytes);  // an empty one before what begins at its place
  });
  uint64_t end = 0;
  for (const StoredTensor& t : header.tensors) {
    if (t.first != end)
      reader.refuse_tensor(t, "data_offsets", fmt::format("begins at {}; the data before it ends at {}", t.first, end));
    if (t.bytes > data_bytes - end)
      reader.refuse_tensor(t, "data_offsets",
                           fmt::format("takes {} bytes from {}; the data has {}", t.bytes, t.first, data_bytes));
    end += t.bytes;
  }
  if (end != data_bytes)
    reader.refuse("file_bytes", fmt::format("the tensors end at {} of {} bytes of data", end, data_bytes));
  return header;
}

std::string header_text(const std::string& path, std::span<const StoredTensor> tensors, const Metadata& metadata) {
  std::string text = "{";
  if (!metadata.empty()) {
    text += fmt::format("\"{}\":{{", kMetadata);
    for (const auto& [key, value] : metadata)
      text += json_text(path, key, "__metadata__") + ":" + json_text(path, value, "__metadata__") + ",";
    text.back() = '}';
    text += ',';
  }
  for (const StoredTensor& t : tensors)
    text += fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}},",
                        json_text(path, t.name, "name"), t.dtype, fmt::join(t.shape, ","), t.first, t.first + t.bytes);
  if (text.back() == ',') text.pop_back();
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

}  // namespace gradwire::io
