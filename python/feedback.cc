// SPDX-License-Identifier: Apache-2.0
// ErrorFeedback: residuals by tensor name. A step is begun by Runner.encode; here it is decided, and the state is
// saved, redistributed and read. Device is bound here too, because a residual lives on one as a runner does.
#include <fmt/format.h>
#include <pybind11/numpy.h>

#include <algorithm>
#include <tuple>

#include "bindings.h"
#include "gradwire/error.h"

namespace gradwire::python {
namespace {

Device make_device(const std::string& kind, int threads, const std::string& simd, int index, Address stream,
                   Address clock) {
  if (kind != "cpu" && kind != "cuda")
    throw Error(ErrorKind::usage, fmt::format("device is '{}'; allowed are cpu and cuda", kind), "device");
  Device device;
  device.kind = kind == "cuda" ? Device::Kind::cuda : Device::Kind::cpu;
  device.threads = threads;
  device.simd = simd;
  device.index = index;
  device.stream = reinterpret_cast<void*>(stream);
  device.clock = reinterpret_cast<uint64_t*>(clock);
  return device;
}

using Shared = std::unique_ptr<SharedFeedback>;

Shared load(const std::string& path, const Device& device) {
  return std::make_unique<SharedFeedback>(ErrorFeedback::load(path, device));
}

// The library wants the states side by side: they are lent for the call and put back, whatever happens. The locks are
// taken in the order of addresses, so that two such calls cannot wait for each other; a state given twice is refused.
std::vector<Shared> redistribute(const std::vector<SharedFeedback*>& ranks, int world) {
  std::vector<SharedFeedback*> ordered = ranks;
  std::sort(ordered.begin(), ordered.end());
  if (std::adjacent_find(ordered.begin(), ordered.end()) != ordered.end())
    throw Error(ErrorKind::usage, "ranks holds the same state twice; it takes one of every rank", "ranks");
  std::vector<std::unique_lock<std::mutex>> locks;
  for (SharedFeedback* rank : ordered) locks.emplace_back(rank->mutex);
  struct Loan {
    const std::vector<SharedFeedback*>& owners;
    std::vector<ErrorFeedback> states;
    explicit Loan(const std::vector<SharedFeedback*>& from) : owners(from) {
      states.reserve(from.size());
      for (SharedFeedback* owner : from) states.push_back(std::move(owner->feedback));
    }
    ~Loan() {
      for (size_t i = 0; i < states.size(); ++i) owners[i]->feedback = std::move(states[i]);
    }
  };
  const Loan loan(ranks);
  std::vector<Shared> result;
  for (ErrorFeedback& state : ErrorFeedback::redistribute(loan.states, world))
    result.push_back(std::make_unique<SharedFeedback>(std::move(state)));
  return result;
}

py::array_t<float> residual(const SharedFeedback& shared, const std::string& side, const std::string& name,
                            uint64_t first) {
  std::vector<float> values;
  {
    const py::gil_scoped_release unlocked;
    const std::lock_guard lock(shared.mutex);
    values = shared.feedback.residual(parse_direction(side), name, first);
  }
  return py::array_t<float>(static_cast<py::ssize_t>(values.size()), values.data());
}

std::vector<std::tuple<std::string, std::string, uint64_t, uint64_t>> entries(const SharedFeedback& shared) {
  const std::lock_guard lock(shared.mutex);
  std::vector<std::tuple<std::string, std::string, uint64_t, uint64_t>> all;
  for (const ErrorFeedback::Entry& entry : shared.feedback.entries())
    all.emplace_back(entry.direction == Direction::up ? "up" : "down", entry.name, entry.first, entry.count);
  return all;
}

void set_residual(SharedFeedback& shared, const std::string& side, const std::string& name, uint64_t first,
                  const py::array_t<float, py::array::c_style>& values) {
  const std::span<const float> flat(values.data(), static_cast<size_t>(values.size()));
  const py::gil_scoped_release unlocked;
  const std::lock_guard lock(shared.mutex);
  shared.feedback.set_residual(parse_direction(side), name, first, flat);
}

py::dict extra(const SharedFeedback& shared) {
  std::map<std::string, std::vector<std::byte>> kept;
  {
    const py::gil_scoped_release unlocked;
    const std::lock_guard lock(shared.mutex);
    kept = shared.feedback.extras();
  }
  py::dict result;
  for (const auto& [name, bytes] : kept)
    result[py::str(name)] = py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return result;
}

void set_extra(SharedFeedback& shared, const std::string& name, const py::bytes& extra) {
  const std::string bytes = extra;
  const py::gil_scoped_release unlocked;
  const std::lock_guard lock(shared.mutex);
  shared.feedback.set_extra(name, std::as_bytes(std::span(bytes)));
}

// A method of the library's, called with the state locked.
template <class Result, class... Arguments>
auto locked(Result (ErrorFeedback::*method)(Arguments...)) {
  return [method](SharedFeedback& shared, Arguments... arguments) {
    const std::lock_guard lock(shared.mutex);
    return (shared.feedback.*method)(arguments...);
  };
}
template <class Result, class... Arguments>
auto locked(Result (ErrorFeedback::*method)(Arguments...) const) {
  return [method](const SharedFeedback& shared, Arguments... arguments) {
    const std::lock_guard lock(shared.mutex);
    return (shared.feedback.*method)(arguments...);
  };
}

}  // namespace

Direction parse_direction(const std::string& side) {
  if (side != "up" && side != "down")
    throw Error(ErrorKind::usage, fmt::format("direction is '{}'; allowed are up and down", side), "direction");
  return side == "up" ? Direction::up : Direction::down;
}

void bind_feedback(py::module_& module) {
  py::class_<Device>(module, "Device", "Where to run: the CPU with some threads, or a GPU with a stream.")
      .def(py::init(&make_device), py::arg("kind") = "cpu", py::arg("threads") = 1, py::arg("simd") = "",
           py::arg("index") = 0, py::arg("stream") = 0, py::arg("clock") = 0);

  py::class_<SharedFeedback>(module, "ErrorFeedback", "Residuals by tensor name.")
      .def(py::init([](const std::string& dtype, const Device& device) {
             return std::make_unique<SharedFeedback>(ErrorFeedback(parse_dtype(dtype), device));
           }),
           py::arg("dtype"), py::arg("device"))
      .def(
          "add",
          [](SharedFeedback& shared, const std::string& side, const std::string& name, uint64_t count, uint64_t first) {
            const std::lock_guard lock(shared.mutex);
            shared.feedback.add(parse_direction(side), name, count, first);
          },
          py::arg("direction"), py::arg("name"), py::arg("count"), py::arg("first"), Unlocked())
      .def("commit", locked(&ErrorFeedback::commit), py::arg("step"), Unlocked())
      .def("rollback", locked(&ErrorFeedback::rollback), py::arg("step"), Unlocked())
      .def(
          "save",
          [](const SharedFeedback& shared, const std::string& path) {
            const std::lock_guard lock(shared.mutex);
            shared.feedback.save(path);
          },
          py::arg("path"), Unlocked())
      .def_static("load", &load, py::arg("path"), py::arg("device"), Unlocked())
      .def_static("redistribute", &redistribute, py::arg("ranks"), py::arg("world"), Unlocked())
      .def("residual", &residual, py::arg("direction"), py::arg("name"), py::arg("first"))
      .def("entries", &entries, Unlocked())
      .def("set_residual", &set_residual, py::arg("direction"), py::arg("name"), py::arg("first"), py::arg("values"))
      .def("extra", &extra)
      .def("set_extra", &set_extra, py::arg("name"), py::arg("extra"))
      .def("hash", locked(&ErrorFeedback::hash), Unlocked())
      .def("bytes", locked(&ErrorFeedback::bytes), Unlocked());
}

}  // namespace gradwire::python
