// SPDX-License-Identifier: Apache-2.0
// ModelCoder and BucketCoder: the coding of what gradwire.torch sends. Threads follow the rules of gradwire/coder.h.
#include "gradwire/coder.h"

#include <fmt/format.h>
#include <pybind11/numpy.h>

#include <tuple>

#include "bindings.h"
#include "device/recording.h"
#include "gradwire/error.h"

namespace gradwire::python {
namespace {

using Tensors = std::vector<std::tuple<std::string, uint64_t, std::string, int>>;  // name, elements, type, dimensions

// One of the words, in their order.
template <class Enum>
Enum one_of(const char* field, const std::string& word, std::initializer_list<std::pair<const char*, Enum>> words) {
  std::string allowed;
  for (const auto& [name, value] : words) {
    if (word == name) return value;
    allowed += fmt::format("{}{}", allowed.empty() ? "" : ", ", name);
  }
  throw Error(ErrorKind::usage, fmt::format("{} is '{}'; allowed are {}", field, word, allowed), field);
}

ReduceOptions::Feedback feedback_of(const char* field, const std::string& word) {
  using Feedback = ReduceOptions::Feedback;
  return one_of<Feedback>(
      field, word,
      {{"codec", Feedback::codec}, {"on", Feedback::on}, {"off", Feedback::off}, {"momentum", Feedback::momentum}});
}

std::unique_ptr<ModelCoder> make_model(const Tensors& list, const std::string& kind, const std::string& method,
                                       const std::string& up, const std::string& down, const std::string& feedback,
                                       const std::string& owner_feedback, const std::string& residual, float decay,
                                       uint64_t seed, uint64_t steps, int rank, int world, const Device& device) {
  CoderOptions options;
  options.kind = one_of<CoderOptions::Kind>("kind", kind,
                                            {{"all_reduce", CoderOptions::Kind::all_reduce},
                                             {"reduce_scatter", CoderOptions::Kind::reduce_scatter},
                                             {"all_gather", CoderOptions::Kind::all_gather}});
  options.reduce.method = one_of<ReduceOptions::Method>(
      "method", method, {{"scatter", ReduceOptions::Method::scatter}, {"gather", ReduceOptions::Method::gather}});
  options.reduce.up = up;
  options.reduce.down = down;
  options.reduce.feedback = feedback_of("feedback", feedback);
  options.reduce.owner_feedback = feedback_of("owner_feedback", owner_feedback);
  options.reduce.residual = parse_dtype(residual);
  options.reduce.decay = decay;
  options.reduce.seed = seed;
  options.reduce.steps = steps;
  options.reduce.device = device;
  options.rank = rank;
  options.world = world;
  std::vector<NamedTensor> tensors;
  for (const auto& [name, count, dtype, dimensions] : list)
    tensors.push_back({name, count, parse_dtype(dtype), dimensions});
  return std::make_unique<ModelCoder>(std::move(tensors), options);
}

py::object stats(ModelCoder& model) {
  std::string bytes;
  {
    const py::gil_scoped_release unlocked;  // both wait for a GPU
    bytes.resize(model.stats_bytes());
    if (!bytes.empty()) model.take_stats(std::as_writable_bytes(std::span(bytes)));
  }
  if (bytes.empty()) return py::none();
  return py::bytes(bytes);
}

void learn(ModelCoder& model, const py::bytes& all_ranks) {
  const std::string bytes = all_ranks;
  const py::gil_scoped_release unlocked;
  model.learn(std::as_bytes(std::span(bytes)));
}

// (spec, bytes in a message) of every tensor.
std::vector<std::pair<std::string, uint64_t>> codecs(const ModelCoder& model, const std::string& side) {
  std::vector<std::pair<std::string, uint64_t>> all;
  const std::vector<Codec> list = model.codecs(parse_direction(side));
  for (size_t i = 0; i < list.size(); ++i) all.emplace_back(list[i].str(), list[i].bytes(model.tensors()[i].count));
  return all;
}

// A copy of the state, on the host; and a state from anywhere, on the model's device.
void copy_state(const ErrorFeedback& from, ErrorFeedback& to) {
  for (const ErrorFeedback::Entry& entry : from.entries()) {
    to.add(entry.direction, entry.name, entry.count, entry.first);
    to.set_residual(entry.direction, entry.name, entry.first, from.residual(entry.direction, entry.name, entry.first));
  }
  for (const auto& [name, extra] : from.extras()) to.set_extra(name, extra);
}

std::unique_ptr<SharedFeedback> state(ModelCoder& model) {
  ErrorFeedback copy(model.feedback().dtype());
  copy_state(model.feedback(), copy);
  return std::make_unique<SharedFeedback>(std::move(copy));
}

void restore(ModelCoder& model, const SharedFeedback& from) {
  ErrorFeedback copy(model.feedback().dtype(), model.feedback().device());
  const std::lock_guard lock(from.mutex);
  copy_state(from.feedback, copy);
  model.restore(std::move(copy));
}

void bind_model(py::module_& module) {
  py::class_<ModelCoder>(module, "ModelCoder",
                         "All tensors of a model: residuals by name, what codecs learn, the step.")
      .def(py::init(&make_model), py::arg("tensors"), py::kw_only(), py::arg("kind") = "all_reduce",
           py::arg("method") = "scatter", py::arg("up"), py::arg("down") = "", py::arg("feedback") = "codec",
           py::arg("owner_feedback") = "on", py::arg("residual") = "f32", py::arg("decay") = 1.0f, py::arg("seed") = 0,
           py::arg("steps") = 0, py::arg("rank") = 0, py::arg("world") = 1, py::arg("device") = Device{})
      .def("plans", &ModelCoder::plans, "What codecs plan with, a line each.")
      .def("handshake", &ModelCoder::handshake, "What must be equal on all ranks, as (field, text).")
      .def(
          "begin",
          [](ModelCoder& m, uint64_t step, float loss_scale, double rate, bool exact) {
            m.begin(step, {loss_scale, rate, exact});
          },
          py::arg("step"), py::kw_only(), py::arg("loss_scale") = 1.0f, py::arg("rate") = -1.0,
          py::arg("exact") = false, Unlocked())
      .def(
          "check_finite",
          [](ModelCoder& m, Address values, size_t count) {
            m.check_finite({reinterpret_cast<float*>(values), count});
          },
          py::arg("values"), py::arg("count"), Unlocked(),
          "f32 values that must be finite too, or the open step changes nothing.")
      .def("end", &ModelCoder::end, Unlocked(), "Commits the step, unless a result was not finite.")
      .def("abandon", &ModelCoder::abandon, Unlocked(), "The open step changes nothing.")
      .def("learns", &ModelCoder::learns, "Whether a codec learns at all.")
      .def("teaches", &ModelCoder::teaches, "Whether the open step teaches something.")
      .def("stats", &stats, "What the last step taught this rank, or None.")
      .def("learn", &learn, py::arg("all_ranks"), "The statistics of all ranks, one after the other.")
      .def("divisible", &ModelCoder::divisible, py::arg("tensor"), "Whether it may be sent in parts.")
      .def("exempt", &ModelCoder::exempt, py::arg("tensor"), "From the next step on this tensor is sent as fp32.")
      .def("codecs", &codecs, py::arg("direction"), "(codec, bytes) of every tensor in the step.")
      .def("skipped", &ModelCoder::skipped, Unlocked(), "Steps whose results were not finite.")
      .def(
          "hash", [](ModelCoder& m) { return m.feedback().hash(); }, Unlocked(),
          "Of all residuals and of what was learned.")
      .def(
          "residual_bytes", [](ModelCoder& m) { return m.feedback().bytes(); },
          "Bytes that residuals take, both copies.")
      .def("state", &state, Unlocked(), "A copy of the residuals and of what was learned, on the host.")
      .def("restore", &restore, py::arg("state"), Unlocked());
}

void bind_buckets(py::module_& module) {
  py::class_<BucketCoder>(module, "BucketCoder",
                          "Some tensors of a ModelCoder, coded together; buffers hold a slot per rank.")
      .def(py::init([](ModelCoder& model, const std::vector<size_t>& tensors, const Device& device, uint64_t part,
                       uint64_t parts) { return std::make_unique<BucketCoder>(model, tensors, device, part, parts); }),
           py::arg("model"), py::arg("tensors"), py::arg("device"), py::arg("part") = 0, py::arg("parts") = 1,
           py::keep_alive<1, 2>(), Unlocked())
      .def(
          "begin", [](BucketCoder& r, const std::vector<uint8_t>& idle) { r.begin(idle); },
          py::arg("idle") = std::vector<uint8_t>{}, Unlocked())
      .def("signature", &BucketCoder::signature,
           "What the open step would enqueue follows from this, from addresses and from the clock.")
      .def("poll", &BucketCoder::poll, "Raises what is known of damaged messages; enqueues nothing.")
      .def_property_readonly("up_send", &BucketCoder::up_send)
      .def_property_readonly("up_recv", &BucketCoder::up_recv)
      .def_property_readonly("down_recv", &BucketCoder::down_recv)
      .def(
          "encode_up",
          [](BucketCoder& r, const std::vector<Address>& in, Address send, size_t bytes) {
            r.encode_up(pointers<const void*>(in), bytes_at(send, bytes));
          },
          py::arg("tensors"), py::arg("send"), py::arg("bytes"), Unlocked())
      .def(
          "decode_own",
          [](BucketCoder& r, Address send, size_t bytes, const std::vector<Address>& out) {
            r.decode_own(bytes_at(send, bytes), pointers<void*>(out));
          },
          py::arg("send"), py::arg("bytes"), py::arg("out"), Unlocked())
      .def(
          "decode_up",
          [](BucketCoder& r, Address recv, size_t bytes, const std::vector<Address>& out) {
            r.decode_up(bytes_at(recv, bytes), pointers<void*>(out));
          },
          py::arg("recv"), py::arg("bytes"), py::arg("out") = std::vector<Address>{}, Unlocked())
      .def(
          "read_means", [](BucketCoder& r, const std::vector<Address>& out) { r.read_means(pointers<void*>(out)); },
          py::arg("out"), Unlocked())
      .def(
          "encode_down",
          [](BucketCoder& r, Address mine, size_t bytes, const std::vector<Address>& values) {
            r.encode_down(bytes_at(mine, bytes), pointers<const void*>(values));
          },
          py::arg("mine"), py::arg("bytes"), py::arg("values") = std::vector<Address>{}, Unlocked())
      .def(
          "decode_down",
          [](BucketCoder& r, Address recv, size_t bytes, const std::vector<Address>& out) {
            r.decode_down(bytes_at(recv, bytes), pointers<void*>(out));
          },
          py::arg("recv"), py::arg("bytes"), py::arg("out"), Unlocked());
}

void bind_recordings(py::module_& module) {
  py::class_<Recording>(module, "Recording", "Work of a GPU's stream that is recorded once and run again.")
      .def(py::init<const Device&>(), py::arg("device"))
      .def("begin", &Recording::begin, Unlocked(), "From here on what this thread enqueues is recorded, and not run.")
      .def("end", &Recording::end, Unlocked())
      .def("run", &Recording::run, Unlocked())
      .def("forget", &Recording::forget, Unlocked());
}

}  // namespace
}  // namespace gradwire::python

void bind_relay(pybind11::module_& module) {
  gradwire::python::bind_model(module);
  gradwire::python::bind_buckets(module);
  gradwire::python::bind_recordings(module);
}
