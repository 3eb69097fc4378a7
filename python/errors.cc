// SPDX-License-Identifier: Apache-2.0
// gradwire::Error becomes the exception of gradwire/_errors.py that its kind names. The classes are written in Python
// because two of them have two parents; they are looked up when the first error is thrown, so that the two halves of
// the package may be imported in any order.
#include <pybind11/gil_safe_call_once.h>

#include "bindings.h"
#include "gradwire/error.h"

namespace gradwire::python {
namespace {

const char* name_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::usage:
      return "UsageError";
    case ErrorKind::frame:
      return "FrameError";
    case ErrorKind::mismatch:
      return "MismatchError";
    case ErrorKind::engine:
      return "EngineError";
    case ErrorKind::io:
      return "FileError";
    case ErrorKind::unsupported:
      return "UnsupportedError";
    case ErrorKind::device:
      return "DeviceError";
  }
  return "Error";
}

// A message may quote a hostile frame, which need not be UTF-8.
py::object text(const std::string& bytes) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<py::ssize_t>(bytes.size()), "backslashreplace"));
}

void raise(const Error& error) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> classes;
  const py::object& module =
      classes.call_once_and_store_result([] { return py::object(py::module_::import("gradwire._errors")); })
          .get_stored();
  const py::object type = module.attr(name_of(error.kind()));
  const py::object rank = error.rank() < 0 ? py::object(py::none()) : py::object(py::int_(error.rank()));
  const py::object instance = type(text(error.what()), py::arg("field") = text(error.field()), py::arg("rank") = rank);
  PyErr_SetObject(type.ptr(), instance.ptr());
}

}  // namespace

void bind_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const Error& error) {
      raise(error);
    }
  });
}

}  // namespace gradwire::python
