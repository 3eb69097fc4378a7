// SPDX-License-Identifier: Apache-2.0
// `gradwire decode`: a frame becomes a .npy file of the shape that it carries, or raw floats where the name of the
// output does not end with .npy. The frame may come from anywhere: its header is checked against --max-elements before
// memory is allocated, and nothing is written unless every check passed.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <memory>

#include "bench/backend.h"
#include "cli/command.h"
#include "cli/console.h"
#include "cli/files.h"
#include "cli/options.h"
#include "codec/npy.h"
#include "codec/output.h"
#include "codec/packed.h"
#include "codec/values.h"
#include "core/machine.h"
#include "gradwire/error.h"
#include "gradwire/message.h"

namespace gradwire::app {
namespace {

struct DecodeOptions {
  std::string in, out, dtype;
  // 16 bytes an element are enough for the message, the floats and their copy in another type.
  uint64_t max_elements = std::min<uint64_t>(machine_memory() / 16, kMaxElements);
  uint64_t tensor = 0;
  bool tensor_chosen = false;
  OutputOptions output;
  BackendOptions backend;
};

struct Converted {
  std::vector<std::byte> data;
  uint64_t overflows = 0;  // finite values that the narrower type can only hold as infinity
};

Converted convert(const std::vector<std::byte>& data, DType from, DType to, uint64_t count) {
  Converted result{std::vector<std::byte>(count * bytes_of(to))};
  for (uint64_t i = 0; i < count; ++i) {
    const float value = load_value(data.data(), from, i);
    store_value(result.data.data(), to, i, value);
    result.overflows += std::isfinite(value) && !std::isfinite(load_value(result.data.data(), to, i));
  }
  return result;
}

size_t chosen_tensor(const DecodeOptions& options, const Head& head) {
  const size_t tensors = head.tensors.size();
  if (tensors == 0) throw Error(ErrorKind::usage, options.in + ": the message holds no tensor", "tensor");
  if (tensors > 1 && !options.tensor_chosen)
    throw Error(ErrorKind::usage,
                fmt::format("{}: the message holds {} tensors: choose one with --tensor 0 to {}", options.in, tensors,
                            tensors - 1),
                "tensor");
  if (options.tensor >= tensors)
    throw Error(ErrorKind::usage,
                fmt::format("--tensor {}: allowed is 0 to {}, {} holds {} tensor{}", options.tensor, tensors - 1,
                            options.in, tensors, tensors == 1 ? "" : "s"),
                "tensor");
  return options.tensor;
}

// What is written: the floats of the chosen tensor in the type that was asked for.
struct Output {
  DType dtype;
  std::vector<std::byte> data;
};

Output output_of(const DecodeOptions& options, DType sent, uint64_t count, std::vector<std::byte> data) {
  DType dtype = options.dtype.empty() ? sent : parse_dtype(options.dtype);
  if (ends_with(options.out, ".npy") && dtype == DType::bf16) {
    if (!options.dtype.empty())
      throw Error(ErrorKind::usage, "--dtype bf16: a .npy file cannot hold it; name OUT otherwise for raw floats",
                  "dtype");
    dtype = DType::f32;
    if (!options.output.quiet) print_note(options.in + " is bf16, which .npy cannot hold: written as float32");
  }
  if (dtype == DType::f32) return {dtype, std::move(data)};
  Converted converted = convert(data, DType::f32, dtype, count);
  if (converted.overflows > 0 && !options.output.quiet)
    print_note(fmt::format("{} element{} too large for {}: written as infinity", converted.overflows,
                           converted.overflows == 1 ? " is" : "s are", name_of(dtype)));
  return {dtype, std::move(converted.data)};
}

void decode(const DecodeOptions& options) {
  check_output(options.in, options.out, options.output);
  Limits limits;
  limits.max_elements = options.max_elements;
  const MessageFile file = read_message(options.in, options.max_elements);
  const std::vector<std::byte>& message = file.message;
  const Head head = named(options.in, [&] { return read_head(message, limits); });
  const size_t chosen = chosen_tensor(options, head);
  named(options.in, [&] { verify_body(message, head); });  // before memory for the elements is taken

  // Decoded as f32, whatever the sender had: another type is made from that, and rounded once.
  std::vector<TensorSpec> tensors = head.tensors;
  for (TensorSpec& tensor : tensors) tensor.dtype = DType::f32;
  const Plan plan(tensors);
  const std::unique_ptr<BenchBackend> backend = make_backend(options.backend);
  const std::unique_ptr<Runner> runner = make_runner(plan, backend->device());
  std::vector<void*> outputs;
  for (const TensorSpec& tensor : tensors) outputs.push_back(backend->allocate(tensor.count * sizeof(float)));
  auto* bytes = static_cast<std::byte*>(backend->allocate(message.size()));
  backend->upload(bytes, message.data(), message.size());
  named(options.in, [&] {
    runner->decode({bytes, message.size()}, outputs);
    runner->wait();
  });

  const TensorSpec& tensor = head.tensors[chosen];
  uint64_t elements = 0;  // of all tensors, since the size of the file is theirs too
  for (const TensorSpec& one : head.tensors) elements += one.count;
  std::vector<std::byte> data(tensor.count * sizeof(float));
  backend->download(data.data(), outputs[chosen], data.size());
  const Output output = output_of(options, tensor.dtype, tensor.count, std::move(data));
  // A message without a shape, such as one of raw floats, becomes an array of one dimension.
  const std::vector<uint64_t> shape = tensor.shape.empty() ? std::vector<uint64_t>{tensor.count} : tensor.shape;
  const std::vector<std::byte> header =
      ends_with(options.out, ".npy") ? npy_header(output.dtype, shape) : std::vector<std::byte>{};
  const std::span<const std::byte> parts[] = {header, output.data};
  write_file(options.out, parts);
  tell(options.output, {.in = options.in,
                        .out = options.out,
                        .bytes_in = file.file_bytes,
                        .bytes_out = header.size() + output.data.size(),
                        .elements = elements,
                        .compressed_bytes = file.file_bytes,
                        .error = {},
                        .more = {{"codec", tensor.codec.wire_spec()},
                                 {"dtype", name_of(output.dtype)},
                                 {"shape", shape},
                                 {"packed", file.packed}}});
}

}  // namespace

void add_decode(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("decode", "Turn a frame back into floats");
  auto options = std::make_shared<DecodeOptions>();
  options->backend.threads = machine_threads();
  add_file(*command, "IN", options->in, "The frame, or - for stdin");
  add_file(*command, "OUT", options->out, "A .npy file to write; any other name (or - for stdout) gets raw floats");
  add_whole(*command, "--max-elements", options->max_elements, 0, UINT64_MAX,
            "Refuse frames that claim more elements; the default is what the memory of this machine can hold");
  add_choice(*command, "--dtype", options->dtype, {"f32", "f16", "bf16"},
             "Type to write; as the frame says if left out");
  CLI::Option* tensor = add_whole(*command, "--tensor", options->tensor, 0, UINT64_MAX,
                                  "Which tensor of a message that holds several, from 0 on");
  add_output(*command, options->output);
  add_device(*command, options->backend);
  command->footer("Example:\n  gradwire decode g.gw back.npy");
  command->callback([&action, options, tensor] {
    options->tensor_chosen = tensor->count() > 0;
    action = [options] { decode(*options); };
  });
}

}  // namespace gradwire::app
