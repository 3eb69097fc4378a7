// SPDX-License-Identifier: Apache-2.0
// Messages at rest: MessageBytes, the memory a frame lives in; TensorSpec and Plan, what a message carries; and Head,
// what a message says of itself. A message is hostile until its head is read, and read_head() believes nothing in it.
#include "gradwire/message.h"

#include <fmt/format.h>

#include <new>

#include "bindings.h"

namespace gradwire::python {
namespace {

// Aligned as vectors like it, and not filled with zeros: the encoder writes every byte. Read-only for Python.
class MessageBytes {
 public:
  explicit MessageBytes(size_t bytes)
      : bytes_(bytes), data_(::operator new (bytes ? bytes : 1, std::align_val_t{64})) {}
  MessageBytes(const MessageBytes&) = delete;
  MessageBytes& operator=(const MessageBytes&) = delete;
  ~MessageBytes() { ::operator delete (data_, std::align_val_t{64}); }
  Address address() const { return reinterpret_cast<Address>(data_); }
  size_t bytes() const { return bytes_; }
  py::buffer_info info() const { return {static_cast<unsigned char*>(data_), static_cast<py::ssize_t>(bytes_), true}; }

 private:
  size_t bytes_;
  void* data_;
};

TensorSpec make_tensor(const std::string& name, uint64_t count, const std::string& dtype, const Codec& codec,
                       uint64_t first, std::optional<uint64_t> name_hash, std::vector<uint64_t> shape) {
  return {name, count, parse_dtype(dtype), codec, first, name_hash, std::move(shape)};
}

Head read(Address message, size_t bytes, uint64_t max_elements, uint32_t max_tensors) {
  return read_head(bytes_at(message, bytes), {max_elements, max_tensors});
}

}  // namespace

void bind_message(py::module_& module) {
  py::class_<MessageBytes>(module, "Buffer", py::buffer_protocol(), "Bytes that hold a message; read-only.")
      .def(py::init<size_t>(), py::arg("nbytes"))
      .def_buffer(&MessageBytes::info)
      .def_property_readonly("address", &MessageBytes::address)
      .def_property_readonly("nbytes", &MessageBytes::bytes)
      .def("__len__", &MessageBytes::bytes);

  py::class_<TensorSpec>(module, "TensorSpec",
                         "A tensor of a plan, or of a message, where only the hash of its name is known.")
      .def(py::init(&make_tensor), py::arg("name"), py::arg("count"), py::arg("dtype"), py::arg("codec"),
           py::arg("first") = 0, py::arg("name_hash") = py::none(), py::arg("shape") = std::vector<uint64_t>{})
      .def_readonly("name", &TensorSpec::name)
      .def_readonly("count", &TensorSpec::count)
      .def_property_readonly("dtype", [](const TensorSpec& tensor) { return std::string(name_of(tensor.dtype)); })
      .def_readonly("codec", &TensorSpec::codec)
      .def_readonly("first", &TensorSpec::first)
      .def_property_readonly(
          "shape", [](const TensorSpec& tensor) { return py::tuple(py::cast(tensor.shape)); },
          "The extents; empty where none were given.")
      .def_property_readonly("name_hash",
                             [](const TensorSpec& tensor) { return tensor.name_hash.value_or(hash_name(tensor.name)); })
      .def("__repr__", [](const TensorSpec& tensor) {
        return fmt::format("TensorSpec('{}', {}, '{}', '{}', first={})", tensor.name, tensor.count,
                           name_of(tensor.dtype), tensor.codec.str(), tensor.first);
      });

  py::class_<Plan, std::shared_ptr<Plan>>(module, "Plan",
                                          "A list of tensors and the layout of the message that carries them.")
      .def(py::init([](std::vector<TensorSpec> tensors) { return std::make_shared<Plan>(std::move(tensors)); }),
           py::arg("tensors"), Unlocked())
      .def_property_readonly("tensors", &Plan::tensors)
      .def_property_readonly("elements", &Plan::elements)
      .def_property_readonly("message_bytes", &Plan::message_bytes);

  py::class_<Head>(module, "Head", "The head of a message, checked.")
      .def_property_readonly("version", [](const Head& h) { return h.version; })
      .def_property_readonly("total_bytes", [](const Head& h) { return h.total_bytes; })
      .def_property_readonly("head_bytes", [](const Head& h) { return h.head_bytes; })
      .def_property_readonly("step", [](const Head& h) { return h.stamp.step; })
      .def_property_readonly("stage", [](const Head& h) { return h.stamp.stage; })
      .def_property_readonly("rank", [](const Head& h) { return h.stamp.rank; })
      .def_property_readonly("world", [](const Head& h) { return h.stamp.world; })
      .def_property_readonly("head_check", [](const Head& h) { return h.head_check; })
      .def_property_readonly("body_check", [](const Head& h) { return h.body_check; })
      .def_property_readonly("spec_count", [](const Head& h) { return h.spec_count; })
      .def_property_readonly("tensors", [](const Head& h) { return h.tensors; })
      .def_property_readonly("body_offsets", [](const Head& h) { return h.body_offsets; });

  module.attr("wire_version") = kWireVersion;
  module.def("read_head", &read, py::arg("message"), py::arg("nbytes"), py::arg("max_elements"), py::arg("max_tensors"),
             Unlocked(), "The head, or FrameError.");
  module.def(
      "verify_body",
      [](Address message, size_t bytes, const Head& head) { verify_body(bytes_at(message, bytes), head); },
      py::arg("message"), py::arg("nbytes"), py::arg("head"), Unlocked(), "FrameError when the body was altered.");
}

}  // namespace gradwire::python
