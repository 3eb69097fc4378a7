// SPDX-License-Identifier: Apache-2.0
// The rules of src/optim that gradwire.torch runs: Quantized Adam's step, and when second moments are pooled. The
// arrays are the caller's, as addresses.
#include <pybind11/stl.h>

#include <array>

#include "bindings.h"
#include "optim/momentum.h"
#include "optim/qadam.h"

namespace gradwire::python {
namespace {

// The numbers of one group of parameters, and the device that their arrays are on.
struct BoundQAdam {
  QAdamOptions options;
  Elementwise elementwise;
};

using SpanAddresses = std::array<Address, 5>;  // gradient, first moment, second moment, shared moment, update

OptimizerSpan span_of(const std::pair<SpanAddresses, uint64_t>& one) {
  const auto at = [&](size_t i) { return reinterpret_cast<float*>(one.first[i]); };
  return {.gradient = at(0), .first = at(1), .second = at(2), .shared = at(3), .out = at(4), .count = one.second};
}

}  // namespace

void bind_optim(py::module_& module) {
  py::class_<BoundQAdam>(module, "QAdamRule", "Quantized Adam's rule for one group of parameters.")
      .def(py::init([](double beta, double theta, double epsilon, bool correction, bool shared, uint64_t share_every,
                       const Device& device) {
             const QAdamOptions options{.beta = beta,
                                        .theta = theta,
                                        .epsilon = epsilon,
                                        .correction = correction,
                                        .shared = shared,
                                        .share_every = share_every};
             check(options);
             return std::unique_ptr<BoundQAdam>(new BoundQAdam{options, Elementwise(device)});
           }),
           py::arg("beta"), py::arg("theta"), py::arg("epsilon"), py::arg("correction"), py::arg("shared"),
           py::arg("share_every"), py::arg("device"))
      .def(
          "step",
          [](const BoundQAdam& rule, const std::vector<std::pair<SpanAddresses, uint64_t>>& parameters, uint64_t taken,
             double rate, bool moves) {
            std::vector<OptimizerSpan> spans;
            for (const auto& one : parameters) spans.push_back(span_of(one));
            qadam_step(rule.elementwise, spans, rule.options, taken, rate, moves);
          },
          py::arg("parameters"), py::arg("taken"), py::arg("rate"), py::arg("moves") = true, Unlocked(),
          "Brings moments up to date, unless `moves` is False, and writes the updates.")
      .def(
          "correction", [](const BoundQAdam& rule, uint64_t taken) { return qadam_correction(rule.options, taken); },
          py::arg("taken"), "What young second moments are divided by.")
      .def(
          "pools", [](const BoundQAdam& rule, uint64_t step) { return qadam_pools(rule.options, step); },
          py::arg("step"), "Whether second moments are pooled in this step, from 0.");
  module.def(
      "next_pooling", &next_pooling, py::arg("taken"),
      "The number of steps at the next pooling of the exchange of momenta, if there is one after `taken` steps.");
}

}  // namespace gradwire::python
