// SPDX-License-Identifier: Apache-2.0
// Codec: a spec string with what it has learned; the registry; and rules, which give every tensor of a model its codec.
// A Codec cannot be changed, so that it can be hashed, compared, pickled and shared.
#include "gradwire/codec.h"

#include <fmt/format.h>

#include "bindings.h"
#include "gradwire/learn.h"
#include "gradwire/plan.h"
#include "gradwire/rules.h"

namespace gradwire::python {
namespace {

std::vector<uint32_t> table_of(const Codec& codec) { return {codec.table().begin(), codec.table().end()}; }

const CodecInfo* info_of(const Codec& codec) {
  for (const CodecInfo& info : codecs())
    if (info.name == codec.name()) return &info;
  return nullptr;
}

py::dict parameters_of(const Codec& codec) {
  py::dict result;
  if (const CodecInfo* info = info_of(codec))
    for (const ParameterInfo& parameter : info->parameters) result[py::str(parameter.name)] = codec.get(parameter.name);
  return result;
}

Codec with(const Codec& codec, const py::kwargs& changes) {
  Codec result = codec;
  for (const auto& [name, value] : changes)
    result = result.with(py::str(name).cast<std::string>(), py::str(value).cast<std::string>());
  return result;
}

std::string repr(const Codec& codec) {
  return fmt::format("Codec('{}'){}", codec.str(), codec.table().empty() ? "" : "  # fitted");
}

py::dict row_of(const CodecInfo& info) {
  const Codec codec = Codec::parse(info.name);
  const Traits traits = codec.traits();
  py::list parameters;
  for (const ParameterInfo& parameter : info.parameters) {
    py::dict row;
    row["name"] = parameter.name;
    row["default"] = parameter.fallback;
    row["allowed"] = parameter.allowed;
    row["meaning"] = parameter.meaning;
    row["learning"] = parameter.learning;
    parameters.append(row);
  }
  py::dict row;
  row["codec"] = info.name;
  row["summary"] = info.summary;
  row["example"] = info.example;
  row["specs"] = info.specs;
  row["spec"] = codec.str();
  row["lossless"] = traits.lossless;
  row["unbiased"] = traits.unbiased;
  row["feedback"] = traits.feedback;
  row["learns"] = traits.learns;
  row["unit"] = traits.unit;
  row["parameters"] = parameters;
  return row;
}

constexpr const char* kCodec = R"(A way to compress a tensor, named by one string.

    >>> import gradwire
    >>> codec = gradwire.Codec("qsgd:bits=4")
    >>> str(codec)
    'qsgd:bits=4,bucket=1024,norm=max,rounding=random'
    >>> codec.with_(bits=3).bytes(1_000_000) < codec.bytes(1_000_000)
    True
    >>> gradwire.Codec("qsgd:bits=9")
    Traceback (most recent call last):
    gradwire.UsageError: qsgd: bits is 9; allowed is an integer from 2 to 8
)";

}  // namespace

void bind_codec(py::module_& module) {
  py::class_<Codec>(module, "Codec", kCodec)
      .def(py::init([](const std::string& spec) { return Codec::parse(spec); }), py::arg("spec"))
      .def(py::init<const Codec&>(), py::arg("codec"))
      .def_property_readonly("name", &Codec::name, "What stands before the colon.")
      .def_property_readonly("parameters", &parameters_of, "Every parameter and its value, as strings.")
      .def("bytes", &Codec::bytes, py::arg("count"),
           "Body bytes of a tensor of `count` elements; the head of the message comes on top.")
      .def(
          "bits",
          [](const Codec& codec, uint64_t count) {
            return count ? 8.0 * static_cast<double>(codec.bytes(count)) / static_cast<double>(count) : 0.0;
          },
          py::arg("count"), "Bits per element of a tensor of `count` elements, the head left out.")
      .def(
          "frame_bytes", [](const Codec& codec, uint64_t count) { return bound(codec, count); }, py::arg("count"),
          "Bytes of a whole frame of `count` elements.")
      .def_property_readonly(
          "lossless", [](const Codec& codec) { return codec.traits().lossless; },
          "Every finite f32 comes back as it was.")
      .def_property_readonly(
          "unbiased", [](const Codec& codec) { return codec.traits().unbiased; },
          "The mean of what is decoded is what was encoded.")
      .def_property_readonly(
          "feedback", [](const Codec& codec) { return codec.traits().feedback; },
          "Whether error feedback is on unless one says otherwise.")
      .def_property_readonly(
          "momentum", [](const Codec& codec) { return codec.traits().feedback || codec.traits().momentum; },
          "Whether error feedback is on where Adam's momentum is exchanged, unless one says otherwise.")
      .def_property_readonly(
          "learns", [](const Codec& codec) { return codec.traits().learns; }, "Has a table that can be fitted to data.")
      .def_property_readonly(
          "unit", [](const Codec& codec) { return codec.traits().unit; },
          "Elements that share side values; 0: the whole tensor.")
      .def_property_readonly("table", &table_of, "What was learned, as words; empty: the defaults.")
      .def("describe", &Codec::describe, "What was learned, or stands in for it, in words.")
      .def("with_", &with, "A codec with other values of some parameters; what was learned is left behind.")
      .def(
          "with_table", [](const Codec& codec, const std::vector<uint32_t>& table) { return codec.fitted(table); },
          py::arg("table"), "The codec with this table.")
      .def_property_readonly("wire_spec", &Codec::wire_spec,
                             "The spec in a message: without the parameters that say how the sender learns.")
      .def("__str__", &Codec::str)
      .def("__repr__", &repr)
      .def(
          "__eq__", [](const Codec& a, const Codec& b) { return a == b; }, py::is_operator())
      .def("__hash__",
           [](const Codec& codec) {
             return py::hash(py::make_tuple(codec.str(), py::tuple(py::cast(table_of(codec)))));
           })
      .def(py::pickle([](const Codec& codec) { return py::make_tuple(codec.str(), table_of(codec)); },
                      [](const py::tuple& state) {
                        const Codec codec = Codec::parse(state[0].cast<std::string>());
                        const auto table = state[1].cast<std::vector<uint32_t>>();
                        return table.empty() ? codec : codec.fitted(table);
                      }));

  py::class_<Rules>(module, "Rules",
                    R"(Which codec carries which tensor: `PATTERN=SPEC` parts, the first that matches wins.

    >>> import gradwire
    >>> rules = gradwire.Rules("*.bias=fp32;1d=fp32;*=qsgd:bits=4")
    >>> rules.codec_for("conv1.bias", 1, 64).name, rules.codec_for("conv1.weight", 4, 9408).name
    ('fp32', 'qsgd')
)")
      .def(py::init([](const std::string& text) { return Rules::parse(text); }), py::arg("text"))
      .def(
          "codec_for",
          [](const Rules& rules, const std::string& name, int dimensions, uint64_t count) {
            return rules.codec_for(name, dimensions, count);
          },
          py::arg("name"), py::arg("dimensions"), py::arg("count"), "The codec of a tensor.")
      .def("__str__", &Rules::str)
      .def("__repr__", [](const Rules& rules) { return fmt::format("Rules('{}')", rules.str()); });

  module.def(
      "codecs",
      [] {
        py::list rows;
        for (const CodecInfo& info : codecs()) rows.append(row_of(info));
        return rows;
      },
      "The registry, a dict each.");
  module.def(
      "hash_name", [](const std::string& name) { return hash_name(name); }, py::arg("name"),
      "The hash that stands for a tensor's name in a message.");
  module.def(
      "fit",
      [](const Codec& codec, Address tensor, uint64_t count, const std::string& dtype, const Device& device) {
        const DType type = parse_dtype(dtype);
        const py::gil_scoped_release unlocked;
        return fit(codec, reinterpret_cast<const void*>(tensor), count, type, device);
      },
      py::arg("codec"), py::arg("tensor"), py::arg("count"), py::arg("dtype"), py::arg("device"),
      "The codec fitted to one tensor.");
}

}  // namespace gradwire::python
