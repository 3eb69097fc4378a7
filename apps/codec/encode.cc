// SPDX-License-Identifier: Apache-2.0
// `gradwire encode`: a file of floats becomes a frame, which is a message of one tensor. The input is a .npy file, of
// which the frame keeps the type and the shape, or raw floats of the type --dtype.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "bench/backend.h"
#include "bench/synthetic.h"
#include "cli/command.h"
#include "cli/console.h"
#include "cli/files.h"
#include "cli/options.h"
#include "codec/npy.h"
#include "codec/output.h"
#include "codec/packed.h"
#include "codec/values.h"
#include "gradwire/error.h"
#include "gradwire/learn.h"

namespace gradwire::app {
namespace {

struct EncodeOptions {
  std::string codec, in, out, dtype, name;
  Stamp stamp;
  BackendOptions backend;
  bool no_fit = false, pack = false;
  OutputOptions output;
};

struct Input {
  DType dtype;
  uint64_t count;
  std::span<const std::byte> data;
  std::vector<uint64_t> shape = {};
  std::vector<std::byte> reordered = {};  // what `data` shows where the file has Fortran order
};

bool is_npy(const EncodeOptions& options, std::span<const std::byte> file) {
  return ends_with(options.in, ".npy") || (options.dtype.empty() && looks_like_npy(file));
}

// A file that can be refused by its first bytes is, before memory is taken for the rest.
void check_first(const EncodeOptions& options, std::span<const std::byte> first) {
  if (is_npy(options, first)) return expect_npy(first, options.in);
  if (options.dtype.empty())
    throw Error(ErrorKind::usage,
                fmt::format("{} is not a .npy file: say --dtype f32, f16 or bf16 for raw floats", options.in), "dtype");
}

Input read_input(const EncodeOptions& options, std::span<const std::byte> file) {
  if (is_npy(options, file)) {
    if (!options.dtype.empty())
      throw Error(ErrorKind::usage,
                  fmt::format("--dtype {}: only for raw floats; {} is a .npy file and says its own type", options.dtype,
                              options.in),
                  "dtype");
    const NpyArray array = parse_npy(file, options.in);
    Input input{array.dtype, array.count, array.data, array.shape};
    if (array.fortran_order && array.shape.size() > 1) {
      input.reordered = in_c_order(array);
      input.data = input.reordered;
    }
    if (input.shape.size() == 1) input.shape.clear();  // what a frame without a shape decodes to
    if (input.shape.size() > kMaxDims) {
      if (!options.output.quiet)
        print_note(fmt::format("{} has {} dimensions; a frame keeps at most {}, so its shape is left out", options.in,
                               input.shape.size(), kMaxDims));
      input.shape.clear();
    }
    return input;
  }
  const DType dtype = parse_dtype(options.dtype);
  if (file.size() % bytes_of(dtype) != 0)
    throw Error(ErrorKind::frame, fmt::format("{}: {} bytes are not a whole number of {} elements", options.in,
                                              file.size(), options.dtype));
  return {dtype, file.size() / bytes_of(dtype), file};
}

// How far the message is from the tensor, as the glossary's error: ||x - x'||^2 / ||x||^2.
double error_of(const Input& input, const Codec& codec, BenchBackend& backend, std::span<const std::byte> message,
                const EncodeOptions& options) {
  const Plan plan(
      {{.name = options.name, .count = input.count, .dtype = DType::f32, .codec = codec, .shape = input.shape}});
  const std::unique_ptr<Runner> runner = make_runner(plan, backend.device());
  void* outputs[] = {backend.allocate(input.count * sizeof(float))};
  runner->decode(message, outputs);
  runner->wait();
  std::vector<float> back(input.count), exact(input.count);
  backend.download(back.data(), outputs[0], back.size() * sizeof(float));
  for (uint64_t i = 0; i < input.count; ++i) exact[i] = load_value(input.data.data(), input.dtype, i);
  return squared_relative_error(exact, back);
}

void encode(const EncodeOptions& options) {
  const Codec codec = Codec::parse(options.codec);  // a wrong spec is refused before a large file is read
  check_output(options.in, options.out, options.output);
  const std::vector<std::byte> file =
      read_file(options.in, [&](std::span<const std::byte> first, auto) { check_first(options, first); });
  const Input input = read_input(options, file);
  const std::unique_ptr<BenchBackend> backend = make_backend(options.backend);
  // The drivers want element alignment, and a .npy view has it only by luck: copy into the backend on the CPU too.
  void* tensor = backend->allocate(input.data.size());
  backend->upload(tensor, input.data.data(), input.data.size());
  const Codec fitted = options.no_fit ? codec : fit(codec, tensor, input.count, input.dtype, backend->device());
  const Plan plan(
      {{.name = options.name, .count = input.count, .dtype = input.dtype, .codec = fitted, .shape = input.shape}});
  const std::unique_ptr<Runner> runner = make_runner(plan, backend->device());
  std::vector<std::byte> frame(plan.message_bytes());
  auto* message = static_cast<std::byte*>(backend->allocate(frame.size()));
  const void* tensors[] = {tensor};
  runner->encode(tensors, options.stamp, {message, frame.size()});
  runner->wait();
  backend->download(frame.data(), message, frame.size());
  if (options.pack) frame = pack(frame);
  const std::span<const std::byte> parts[] = {frame};
  write_file(options.out, parts);
  if (!options.output.tells()) return;  // the error takes a decoding
  tell(options.output, {.in = options.in,
                        .out = options.out,
                        .bytes_in = file.size(),
                        .bytes_out = frame.size(),
                        .elements = input.count,
                        .compressed_bytes = frame.size(),
                        .error = error_of(input, fitted, *backend, {message, plan.message_bytes()}, options),
                        .more = {{"codec", fitted.wire_spec()}, {"packed", options.pack}}});
}

}  // namespace

void add_encode(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("encode", "Compress a file of floats into a frame");
  auto options = std::make_shared<EncodeOptions>();
  options->backend.threads = machine_threads();
  command->add_option("--codec", options->codec, "Codec and parameters, e.g. qsgd:bits=4; see gradwire codecs")
      ->type_name("SPEC")
      ->required();
  add_file(*command, "IN", options->in, "A .npy file (float32 or float16), raw floats with --dtype, or - for stdin");
  add_file(*command, "OUT", options->out, "The frame to write (usually .gw), or - for stdout");
  add_choice(*command, "--dtype", options->dtype, {"f32", "f16", "bf16"}, "Type of raw floats in IN (little-endian)");
  command->add_option("--name", options->name, "Tensor name; its hash travels in the frame and keys the random bits")
      ->type_name("NAME");
  add_whole(*command, "--seed", options->stamp.seed, 0, UINT64_MAX, "Seed of the random bits");
  add_whole(*command, "--step", options->stamp.step, 0, UINT64_MAX, "Step number written into the frame");
  command->add_flag("--no-fit", options->no_fit,
                    "Use the codec's defaults; otherwise one that learns is fitted to IN first");
  command->add_flag("--pack", options->pack,
                    "Entropy-code the file as a whole (Zstandard); decode and inspect see it by themselves");
  add_output(*command, options->output);
  add_device(*command, options->backend);
  command->footer("Example:\n  gradwire encode --codec qsgd:bits=4 --seed 1 --step 7 g.npy g.gw");
  command->callback([&action, options] { action = [options] { encode(*options); }; });
}

}  // namespace gradwire::app
