// SPDX-License-Identifier: Apache-2.0
// `gradwire inspect`: every field of a frame, in words, without decoding it. A head that does not hold together is an
// error that names the field. A body whose checksum is wrong is shown as such, and the exit code says it too.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/console.h"
#include "cli/files.h"
#include "cli/options.h"
#include "codec/packed.h"
#include "gradwire/error.h"
#include "gradwire/message.h"

namespace gradwire::app {
namespace {

std::string stage_in_words(uint32_t stage) {
  if (stage == 0) return "up: a worker to the owner";
  if (stage == 1) return "down: the owner to everybody";
  return "the caller's own";
}

std::string unit_in_words(uint64_t unit) {
  if (unit == 0) return "the whole tensor";
  return unit == 1 ? "each element by itself" : human_count(unit) + " elements";
}

std::string shape_in_words(const std::vector<uint64_t>& shape) {
  return shape.empty() ? "not given" : fmt::format("({}{})", fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
}

double bits(uint64_t bytes, uint64_t elements) {
  return elements == 0 ? 0 : 8.0 * static_cast<double>(bytes) / static_cast<double>(elements);
}

uint64_t elements_of(const Head& head) {
  uint64_t total = 0;
  for (const TensorSpec& tensor : head.tensors) total += tensor.count;
  return total;
}

// What the file takes beside what the message takes. They differ where the file was packed.
struct FileSize {
  uint64_t bytes;
  bool packed;
};

double packing_ratio(const FileSize& file, const Head& head) {
  return static_cast<double>(head.total_bytes) / static_cast<double>(file.bytes);
}

// fp32 bytes / bytes sent, of the message, or of the file that it is packed in.
double ratio(uint64_t elements, uint64_t bytes) {
  return 4.0 * static_cast<double>(elements) / static_cast<double>(bytes);
}

void print_json(const std::string& path, const FileSize& file, const Head& head, const std::string& body_verdict) {
  const uint64_t elements = elements_of(head);
  nlohmann::ordered_json row = {{"file", path},
                                {"magic", "GWIR"},
                                {"version", head.version},
                                {"flags", 0},
                                {"packed", file.packed},
                                {"file_bytes", file.bytes},
                                {"packing_ratio", packing_ratio(file, head)},
                                {"total_bytes", head.total_bytes},
                                {"step", head.stamp.step},
                                {"stage", head.stamp.stage},
                                {"rank", head.stamp.rank},
                                {"world", head.stamp.world},
                                {"head_bytes", head.head_bytes},
                                {"spec_count", head.spec_count},
                                {"tensor_count", head.tensors.size()},
                                {"head_check", fmt::format("{:016x}", head.head_check)},
                                {"head_check_verdict", "ok"},
                                {"body_check", fmt::format("{:016x}", head.body_check)},
                                {"body_check_verdict", body_verdict},
                                {"elements", elements},
                                {"ratio", ratio(elements, head.total_bytes)},
                                {"file_ratio", ratio(elements, file.bytes)},
                                {"bits_per_element", bits(head.total_bytes, elements)}};
  row["tensors"] = nlohmann::ordered_json::array();
  for (size_t i = 0; i < head.tensors.size(); ++i) {
    const TensorSpec& tensor = head.tensors[i];
    row["tensors"].push_back(
        {{"index", i},
         {"name_hash", fmt::format("{:016x}", tensor.name_hash.value_or(0))},
         {"count", tensor.count},
         {"first", tensor.first},
         {"shape", tensor.shape},
         {"dtype", std::string(name_of(tensor.dtype))},
         {"codec", tensor.codec.wire_spec()},
         {"table", std::vector<uint32_t>(tensor.codec.table().begin(), tensor.codec.table().end())},
         {"fitted", tensor.codec.describe()},
         {"unit", tensor.codec.traits().unit},
         {"body_offset", head.body_offsets[i]},
         {"body_bytes", tensor.codec.bytes(tensor.count)},
         {"bits_per_element", bits(tensor.codec.bytes(tensor.count), tensor.count)}});
  }
  print(row.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

void print_page(const std::string& path, const FileSize& file, const Head& head, const std::string& body_verdict) {
  const uint64_t elements = elements_of(head);
  const auto line = [](const char* name, const std::string& value) { print(fmt::format("{:<18}{}\n", name, value)); };
  line("file", path);
  if (file.packed)
    line("packed", fmt::format("{} bytes in the file, {} unpacked; ratio of the file {:.2f}", human_count(file.bytes),
                               human_count(head.total_bytes), ratio(elements, file.bytes)));
  line("magic", "GWIR");
  line("version", std::to_string(head.version));
  line("flags", "0");
  line("total bytes", fmt::format("{} (head {}, body {})", human_count(head.total_bytes), human_count(head.head_bytes),
                                  human_count(head.total_bytes - head.head_bytes)));
  line("step", std::to_string(head.stamp.step));
  line("stage", fmt::format("{} ({})", head.stamp.stage, stage_in_words(head.stamp.stage)));
  line("rank", fmt::format("{} of {}", head.stamp.rank, head.stamp.world));
  line("head checksum", fmt::format("{:016x} ok", head.head_check));
  line("body checksum", fmt::format("{:016x} {}", head.body_check, body_verdict));
  line("elements", fmt::format("{} in {} tensor{}, {} codec{}", human_count(elements), head.tensors.size(),
                               head.tensors.size() == 1 ? "" : "s", head.spec_count, head.spec_count == 1 ? "" : "s"));
  line("bits per element", fmt::format("{:.4f} (every byte counted)", bits(head.total_bytes, elements)));
  line("ratio", fmt::format("{:.2f} (fp32 bytes / bytes of the message)", ratio(elements, head.total_bytes)));
  if (head.tensors.size() == 1) {
    const TensorSpec& tensor = head.tensors[0];
    line("codec", tensor.codec.wire_spec());
    for (const std::string& text : tensor.codec.describe()) line("", text);
    line("unit", unit_in_words(tensor.codec.traits().unit));
    line("dtype", std::string(name_of(tensor.dtype)));
    line("shape", shape_in_words(tensor.shape));
    line("name hash", fmt::format("{:016x}", tensor.name_hash.value_or(0)));
    line("first element", human_count(tensor.first));
    line("body", fmt::format("{} bytes, from byte {} of the body", human_count(tensor.codec.bytes(tensor.count)),
                             human_count(head.body_offsets[0])));
    return;
  }
  if (head.tensors.empty()) return;
  ConsoleTable table("rlrlrlrrrrl", {"tensor", "name hash", "count", "shape", "first", "dtype", "unit", "offset",
                                     "bytes", "bits/element", "codec"});
  for (size_t i = 0; i < head.tensors.size(); ++i) {
    const TensorSpec& tensor = head.tensors[i];
    const uint64_t bytes = tensor.codec.bytes(tensor.count);
    const uint64_t unit = tensor.codec.traits().unit;
    table.row({std::to_string(i), fmt::format("{:016x}", tensor.name_hash.value_or(0)), human_count(tensor.count),
               shape_in_words(tensor.shape), human_count(tensor.first), std::string(name_of(tensor.dtype)),
               unit == 0 ? "whole" : human_count(unit), human_count(head.body_offsets[i]), human_count(bytes),
               fmt::format("{:.4f}", bits(bytes, tensor.count)), tensor.codec.wire_spec()});
  }
  print("\n" + table.str());
}

struct InspectOptions {
  std::string file;
  uint64_t max_elements = kMaxElements;
  bool json = false;
};

void inspect(const InspectOptions& options) {
  const std::string& path = options.file;
  const MessageFile file = read_message(path, options.max_elements);
  const std::vector<std::byte>& message = file.message;
  Limits limits;
  limits.max_elements = options.max_elements;
  const Head head = named(path, [&] { return read_head(message, limits); });
  std::string verdict = "ok";
  std::unique_ptr<Error> altered;
  try {
    named(path, [&] { verify_body(message, head); });
  } catch (const Error& error) {
    verdict = "wrong: the body was altered";
    altered = std::make_unique<Error>(error);
  }
  if (options.json) {
    print_json(path, {file.file_bytes, file.packed}, head, altered ? "wrong" : "ok");
  } else {
    print_page(path, {file.file_bytes, file.packed}, head, verdict);
  }
  if (altered) throw *altered;
}

}  // namespace

void add_inspect(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("inspect", "Show every field of a frame and check its checksums");
  auto options = std::make_shared<InspectOptions>();
  add_file(*command, "FILE", options->file, "The frame, or - for stdin");
  add_whole(*command, "--max-elements", options->max_elements, 0, UINT64_MAX, "Refuse frames that claim more elements");
  command->add_flag("--json", options->json, "One JSON object");
  command->footer("Example:\n  gradwire inspect g.gw");
  command->callback([&action, options] { action = [options] { inspect(*options); }; });
}

}  // namespace gradwire::app
