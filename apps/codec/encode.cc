// SPDX-License-Identifier: Apache-2.0
// `gradwire encode`: a file of floats becomes a frame, which is a message of one tensor. The input is a .npy file, of
// which the frame keeps the type and the shape, or raw floats of the type --dtype.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "bench/backend.h"
#include "cli/command.h"
#include "cli/files.h"
#include "cli/options.h"
#include "codec/npy.h"
#include "codec/output.h"
#include "codec/packed.h"
#include "gradwire/error.h"
#include "gradwire/learn.h"

namespace gradwire::app {
namespace {

struct EncodeOptions {
  std::string codec, in, out, dtype, name;
  Stamp stamp;
  BackendOptions backend;
  bool no_fit = false, pack = false, force = false;
};

struct Input {
  DType dtype;
  uint64_t count;
  std::span<const std::byte> data;
  std::vector<uint64_t> shape = {};
  std::vector<std::byte> reordered = {};  // what `data` shows where the file has Fortran order
};

Input read_input(const EncodeOptions& options, std::span<const std::byte> file) {
  const bool npy = ends_with(options.in, ".npy") || (options.dtype.empty() && looks_like_npy(file));
  if (npy) {
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
      std::fprintf(stderr,
                   "gradwire: note: %s has %zu dimensions; a frame keeps at most %zu, so its shape is left out\n",
                   options.in.c_str(), input.shape.size(), kMaxDims);
      input.shape.clear();
    }
    return input;
  }
  if (options.dtype.empty())
    throw Error(ErrorKind::usage,
                fmt::format("{} is not a .npy file: say --dtype f32, f16 or bf16 for raw floats", options.in), "dtype");
  const DType dtype = parse_dtype(options.dtype);
  if (file.size() % bytes_of(dtype) != 0)
    throw Error(ErrorKind::frame, fmt::format("{}: {} bytes are not a whole number of {} elements", options.in,
                                              file.size(), options.dtype));
  return {dtype, file.size() / bytes_of(dtype), file};
}

void encode(const EncodeOptions& options) {
  const Codec codec = Codec::parse(options.codec);  // a wrong spec is refused before a large file is read
  check_output(options.in, options.out, options.force);
  const std::vector<std::byte> file = read_file(options.in);
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
  add_force(*command, options->force);
  add_device(*command, options->backend);
  command->footer("Example:\n  gradwire encode --codec qsgd:bits=4 --seed 1 --step 7 g.npy g.gw");
  command->callback([&action, options] { action = [options] { encode(*options); }; });
}

}  // namespace gradwire::app
