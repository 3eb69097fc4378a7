// SPDX-License-Identifier: Apache-2.0
// Loading takes exactly the members that saving writes. It first checks that the file is a server's and of this
// version, then that its hash is right, and then every field: a program that can write the file can also make the hash
// right.
#include "server/checkpoint.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "gradwire/error.h"
#include "io/json.h"

namespace gradwire::server {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "gradwire server state";
constexpr const char* kVersion = "1";
constexpr const char* kState = "gradwire.state";
constexpr const char* kCheck = "gradwire.check";

bool is_ours(std::string_view name) { return name.starts_with("gradwire."); }

// ---- saving

[[noreturn]] void misuse(const std::string& path, const std::string& field, const std::string& why) {
  throw Error(ErrorKind::usage, fmt::format("{}: {}: {}", path, field, why), field);
}

bool is_utf8(const std::string& text) {
  try {
    static_cast<void>(json(text).dump());
    return true;
  } catch (const json::exception&) {
    return false;
  }
}

// A value must be the same after it was saved and loaded: JSON text is UTF-8 and has no infinities, and the reader
// bounds the nesting, of which the lists and rows of the state take 4 levels themselves.
void check_json(const std::string& path, const std::string& field, const json& value, size_t depth = 4) {
  if (value.is_binary() || value.is_discarded()) misuse(path, field, "has a value that JSON text cannot hold");
  if (value.is_number_float() && !std::isfinite(value.get<double>()))
    misuse(path, field, fmt::format("has the number {}; JSON text holds finite ones", value.get<double>()));
  if (value.is_string() && !is_utf8(value.get_ref<const std::string&>()))
    misuse(path, field, fmt::format("{} is not UTF-8", shown(value.get_ref<const std::string&>())));
  if (!value.is_structured()) return;
  if (depth == kMaxJsonDepth) misuse(path, field, fmt::format("is nested more than {} deep", kMaxJsonDepth - 4));
  for (const auto& [key, inner] : value.items()) {
    if (value.is_object() && !is_utf8(key)) misuse(path, field, fmt::format("{} is not UTF-8", shown(key)));
    check_json(path, field, inner, depth + 1);
  }
}

json bit_patterns(const std::vector<double>& values) {
  json list = json::array();
  for (const double value : values) list.push_back(fmt::format("{:016x}", std::bit_cast<uint64_t>(value)));
  return list;
}

json names_of(const std::string& path, const std::vector<StoredArray>& arrays) {
  json list = json::array();
  for (const StoredArray& array : arrays) list.push_back(array.name);
  check_json(path, "name", list);
  return list;
}

json row_of(const std::string& path, const std::string& field, const WorkerRow& worker) {
  if (worker.computed.size() != worker.sequence.size() || worker.residual.size() != worker.sequence.size())
    misuse(path, field,
           fmt::format("has {} sequence, {} computed and {} residual numbers; one for each shard is expected",
                       worker.sequence.size(), worker.computed.size(), worker.residual.size()));
  check_json(path, field + ".id", worker.id);
  check_json(path, field + ".name", worker.name);
  check_json(path, field + ".extra", worker.extra);
  return {{"id", worker.id},
          {"name", worker.name},
          {"left", worker.left},
          {"sequence", worker.sequence},
          {"computed", bit_patterns(worker.computed)},
          {"residual", bit_patterns(worker.residual)},
          {"extra", worker.extra}};
}

std::string state_text(const std::string& path, const ServerState& state) {
  if (!state.signature.is_object())
    misuse(path, "signature", fmt::format("is {}; an object is expected", state.signature.type_name()));
  check_json(path, "signature", state.signature);
  check_json(path, "extra", state.extra);
  json workers = json::array();
  std::unordered_set<std::string_view> ids;
  for (const WorkerRow& worker : state.workers) {
    if (!ids.insert(worker.id).second) misuse(path, "workers", fmt::format("{} stands twice", shown(worker.id)));
    workers.push_back(row_of(path, fmt::format("workers[{}]", workers.size()), worker));
  }
  const json all = {{"step", state.step},
                    {"signature", state.signature},
                    {"extra", state.extra},
                    {"workers", std::move(workers)},
                    {"weights", names_of(path, state.weights)},
                    {"buffers", names_of(path, state.buffers)},
                    {"others", names_of(path, state.others)}};
  std::string text = all.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kMaxStateBytes)
    misuse(path, kState, fmt::format("has {} bytes; at most {} are allowed", text.size(), kMaxStateBytes));
  return text;
}

// ---- loading

// Takes the members of the state text, and says which one is wrong.
class StateReader {
 public:
  explicit StateReader(const SafetensorsFile& file) : file_(file) {}

  [[noreturn]] void refuse(const std::string& field, const std::string& why) const {
    throw Error(ErrorKind::frame, fmt::format("{}: {}: {}", file_.path(), field, why), field);
  }

  void check_format() const {
    const auto& metadata = file_.metadata();
    const auto format = metadata.find("format"), version = metadata.find("version");
    if (format == metadata.end() || format->second != kFormat)
      refuse("format", fmt::format("this safetensors file is not a {}", kFormat));
    if (version == metadata.end() || version->second != kVersion)
      refuse("version", fmt::format("is {}; this build reads {}",
                                    version == metadata.end() ? "missing" : shown(version->second), kVersion));
    if (file_.tensors().empty() || file_.tensors().back().name != kCheck)
      refuse(kCheck, "is not the last tensor of the file");
    const StoredTensor& last = file_.tensors().back();
    if (last.dtype != "U8" || last.shape != std::vector<int64_t>{8})
      refuse(kCheck, fmt::format("is {} of {} bytes; U8 [8] is expected", last.dtype, last.bytes));
    uint64_t stored;
    std::memcpy(&stored, file_.read(last).data(), sizeof stored);
    const uint64_t computed = file_.hash(file_.file_bytes() - sizeof stored);
    if (stored != computed)
      refuse(kCheck, fmt::format("is {:016x}, computed {:016x}: the file was altered or is torn", stored, computed));
  }

  json parse(const StoredTensor& tensor) const {
    if (tensor.dtype != "U8" || tensor.shape.size() != 1)
      refuse(kState, fmt::format("is {} of {} dimensions; U8 of 1 is expected", tensor.dtype, tensor.shape.size()));
    if (tensor.bytes > kMaxStateBytes)
      refuse(kState, fmt::format("has {} bytes; at most {} are allowed", tensor.bytes, kMaxStateBytes));
    const std::vector<std::byte> bytes = file_.read(tensor);
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    std::string error;
    json value = parse_bounded(text, error);
    if (!error.empty()) refuse(kState, error);
    return value;
  }

  // The object has these keys and no other.
  void expect_object(const json& value, const std::string& field, std::initializer_list<const char*> keys) const {
    if (!value.is_object()) refuse(field, fmt::format("is {}; an object is expected", value.type_name()));
    for (const char* key : keys)
      if (!value.contains(key)) refuse(field, fmt::format("has no \"{}\"", key));
    if (value.size() == keys.size()) return;
    for (const auto& [key, inner] : value.items())
      if (std::find(keys.begin(), keys.end(), key) == keys.end())
        refuse(field, fmt::format("has {}, which version {} does not know", shown(key), kVersion));
  }
  const json& array(const json& value, const std::string& field) const {
    if (!value.is_array()) refuse(field, fmt::format("is {}; an array is expected", value.type_name()));
    return value;
  }
  uint64_t number(const json& value, const std::string& field) const {
    if (!value.is_number_unsigned())
      refuse(field, fmt::format("is {}; an integer from 0 to 2^64 - 1 is expected", shown(value.dump())));
    return value.get<uint64_t>();
  }
  std::string text(const json& value, const std::string& field) const {
    if (!value.is_string()) refuse(field, fmt::format("is {}; a text is expected", value.type_name()));
    return value.get<std::string>();
  }
  double from_bits(const json& value, const std::string& field) const {
    const std::string digits = text(value, field);
    if (digits.size() != 16 || digits.find_first_not_of("0123456789abcdef") != std::string::npos)
      refuse(field, fmt::format("is {}; 16 hex digits are expected", shown(digits)));
    return std::bit_cast<double>(static_cast<uint64_t>(std::stoull(digits, nullptr, 16)));
  }

  WorkerRow worker(const json& value, const std::string& field) const {
    expect_object(value, field, {"id", "name", "left", "sequence", "computed", "residual", "extra"});
    WorkerRow row;
    row.id = text(value["id"], field + ".id");
    row.name = text(value["name"], field + ".name");
    if (!value["left"].is_boolean())
      refuse(field + ".left", fmt::format("is {}; a boolean is expected", value["left"].type_name()));
    row.left = value["left"].get<bool>();
    for (const json& entry : array(value["sequence"], field + ".sequence"))
      row.sequence.push_back(number(entry, field + ".sequence"));
    for (const json& entry : array(value["computed"], field + ".computed"))
      row.computed.push_back(from_bits(entry, field + ".computed"));
    for (const json& entry : array(value["residual"], field + ".residual"))
      row.residual.push_back(from_bits(entry, field + ".residual"));
    if (row.computed.size() != row.sequence.size() || row.residual.size() != row.sequence.size())
      refuse(field, fmt::format("has {} sequence, {} computed and {} residual numbers; one for each shard is expected",
                                row.sequence.size(), row.computed.size(), row.residual.size()));
    row.extra = value["extra"];
    return row;
  }

  // Moves the tensors that a list names out of `left`.
  std::vector<StoredArray> arrays(const json& list, const std::string& field, bool ours,
                                  std::unordered_map<std::string_view, const StoredTensor*>& left) const {
    std::vector<StoredArray> result;
    for (const json& entry : array(list, field)) {
      const std::string name = text(entry, field);
      const auto at = left.find(name);
      if (at == left.end()) refuse(field, fmt::format("names {}, which the file does not have (again)", shown(name)));
      const StoredTensor& tensor = *at->second;
      left.erase(at);
      if (is_ours(name) != ours)
        refuse(field, fmt::format("names {}; names that begin with \"gradwire.\" belong in others and only there",
                                  shown(name)));
      if (tensor.dtype != "F32")
        refuse(field, fmt::format("names {}, whose dtype is {}; F32 is expected", shown(name), tensor.dtype));
      result.push_back({name, tensor.shape, file_.read_f32(tensor)});
    }
    return result;
  }

 private:
  const SafetensorsFile& file_;
};

bool exists(const std::string& path) {
  struct stat info;
  if (::lstat(path.c_str(), &info) == 0) return true;
  if (errno == ENOENT) return false;
  throw Error(ErrorKind::io, fmt::format("{}: cannot open: {}", path, std::strerror(errno)), "path");
}

}  // namespace

void save_state(const std::string& path, const ServerState& state, const WriteHook& hook) {
  const std::string text = state_text(path, state);
  std::vector<TensorBytes> tensors;
  const auto add = [&](const std::vector<StoredArray>& arrays, bool ours) {
    for (const StoredArray& array : arrays) {
      if (is_ours(array.name) != ours || array.name == kState || array.name == kCheck)
        misuse(path, "name",
               fmt::format("{} {}", shown(array.name),
                           ours ? "must begin with \"gradwire.\" and be neither gradwire.state nor gradwire.check"
                                : "begins with \"gradwire.\", which is kept for the server's own arrays"));
      tensors.push_back({array.name, "F32", array.shape, std::as_bytes(std::span(array.values))});
    }
  };
  add(state.weights, false);
  add(state.buffers, false);
  add(state.others, true);
  tensors.push_back({kState, "U8", {static_cast<int64_t>(text.size())}, std::as_bytes(std::span(text))});
  const Metadata metadata = {{"format", kFormat}, {"version", kVersion}, {"step", std::to_string(state.step)}};
  write_safetensors(path, tensors, metadata, {.check = kCheck, .keep_former = true, .hook = hook});
}

ServerState load_state(const std::string& path) {
  const SafetensorsFile file(path);
  const StateReader reader(file);
  reader.check_format();
  std::unordered_map<std::string_view, const StoredTensor*> left;
  for (const StoredTensor& tensor : file.tensors()) left[tensor.name] = &tensor;
  left.erase(kCheck);
  const auto text = left.find(kState);
  if (text == left.end()) reader.refuse(kState, "is missing");
  const json all = reader.parse(*text->second);
  left.erase(text);

  reader.expect_object(all, kState, {"step", "signature", "extra", "workers", "weights", "buffers", "others"});
  ServerState state;
  state.step = reader.number(all["step"], "step");
  const auto step = file.metadata().find("step");
  if (file.metadata().size() != 3 || step == file.metadata().end() || step->second != std::to_string(state.step))
    reader.refuse("__metadata__",
                  fmt::format("does not say format, version and step {}, as the state does", state.step));
  state.signature = all["signature"];
  if (!state.signature.is_object())
    reader.refuse("signature", fmt::format("is {}; an object is expected", state.signature.type_name()));
  state.extra = all["extra"];
  std::unordered_set<std::string> ids;
  for (const json& value : reader.array(all["workers"], "workers")) {
    state.workers.push_back(reader.worker(value, fmt::format("workers[{}]", state.workers.size())));
    if (!ids.insert(state.workers.back().id).second)
      reader.refuse("workers", fmt::format("{} stands twice", shown(state.workers.back().id)));
  }
  state.weights = reader.arrays(all["weights"], "weights", false, left);
  state.buffers = reader.arrays(all["buffers"], "buffers", false, left);
  state.others = reader.arrays(all["others"], "others", true, left);
  if (!left.empty())
    reader.refuse(kState, fmt::format("does not say what the tensor {} is", shown(left.begin()->first)));
  return state;
}

std::optional<ServerState> load_newest(const std::string& path, std::string* note) {
  const std::string old = path + ".old";
  if (!exists(path) && !exists(old)) return std::nullopt;
  try {
    return load_state(path);
  } catch (const Error& newest) {
    if (!exists(old)) throw;
    try {
      ServerState state = load_state(old);
      if (note) *note = fmt::format("{}; went back to {} (step {})", newest.what(), old, state.step);
      return state;
    } catch (const Error& former) {
      throw Error(newest.kind(), fmt::format("{}; and {}", newest.what(), former.what()), newest.field());
    }
  }
}

}  // namespace gradwire::server
