// SPDX-License-Identifier: Apache-2.0
// What the files of gradwire._core share. The module is a thin layer of numbers: tensors, messages and streams cross
// the boundary as addresses, and the Python files beside it know what an array is. Whoever touches data lets go of the
// GIL first; whatever holds state has a mutex of its own, taken after the GIL is let go of, never before.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "gradwire/feedback.h"

namespace gradwire::python {

namespace py = pybind11;
using Unlocked = py::call_guard<py::gil_scoped_release>;
using Address = uintptr_t;

void bind_errors(py::module_& module);
void bind_codec(py::module_& module);
void bind_message(py::module_& module);
void bind_runner(py::module_& module);
void bind_feedback(py::module_& module);
void bind_optim(py::module_& module);
void bind_lowrank(py::module_& module);
void bind_report(py::module_& module);  // only where nlohmann-json is found

inline std::span<std::byte> bytes_at(Address address, size_t bytes) {
  return {reinterpret_cast<std::byte*>(address), bytes};
}

template <class Pointer>
std::vector<Pointer> pointers(const std::vector<Address>& addresses) {
  std::vector<Pointer> result;
  result.reserve(addresses.size());
  for (Address address : addresses) result.push_back(reinterpret_cast<Pointer>(address));
  return result;
}

Direction parse_direction(const std::string& side);  // "up" or "down"

// An ErrorFeedback that several threads may call.
struct SharedFeedback {
  explicit SharedFeedback(ErrorFeedback&& state) : feedback(std::move(state)) {}
  ErrorFeedback feedback;
  mutable std::mutex mutex;
};

}  // namespace gradwire::python

void bind_relay(pybind11::module_& module);  // relay.cc: the collectives of gradwire.torch
