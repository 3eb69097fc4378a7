// SPDX-License-Identifier: Apache-2.0
// The products of lowrank on the CPU, for stacks of matrices of one shape. All arrays are the caller's, as addresses;
// the residuals and the factors of a stack stand one after the other, gradients and results wherever they are.
#include <pybind11/stl.h>

#include "bindings.h"
#include "codec/lowrank/orthonormal.h"
#include "codec/lowrank/products.h"

namespace gradwire::python {
namespace {

// Matrices of one shape in one step.
struct BoundLowRank {
  LowRankMatrix shape;  // without places
  std::vector<Address> gradients;
  Address residuals, stored;  // stored: where M is, or null
  Pool& pool;

  LowRankMatrix at(size_t k) const {
    LowRankMatrix one = shape;
    one.gradient = reinterpret_cast<const void*>(gradients[k]);
    one.residual = reinterpret_cast<const float*>(residuals) + k * one.rows * one.columns;
    return stored ? stored_matrix(one, matrix_of(stored, k)) : one;
  }
  float* matrix_of(Address stack, size_t k) const {
    return stack ? reinterpret_cast<float*>(stack) + k * shape.rows * shape.columns : nullptr;
  }
  const float* rows_of(Address factors, size_t k) const {  // rank x rows
    return reinterpret_cast<const float*>(factors) + k * shape.rank * shape.rows;
  }
  const float* columns_of(Address factors, size_t k) const {  // rank x columns
    return reinterpret_cast<const float*>(factors) + k * shape.rank * shape.columns;
  }
};

struct BoundPool {
  Pool pool;
  explicit BoundPool(int threads) : pool(threads) {}
};

}  // namespace

void bind_lowrank(py::module_& module) {
  py::class_<BoundPool>(module, "Pool", "Threads that share the rows of a matrix.")
      .def(py::init([](int threads) { return std::make_unique<BoundPool>(threads); }), py::arg("threads"));
  py::class_<BoundLowRank>(module, "LowRankMatrices", "Matrices M = factor * gradient + decay * residual of one shape.")
      .def(py::init([](BoundPool& pool, uint64_t rows, uint64_t columns, uint32_t rank, std::vector<Address> gradients,
                       const std::string& dtype, Address residuals, float factor, float decay, Address stored) {
             const LowRankMatrix shape{.rows = rows,
                                       .columns = columns,
                                       .rank = rank,
                                       .gradient = nullptr,
                                       .dtype = parse_dtype(dtype),
                                       .residual = nullptr,
                                       .factor = factor,
                                       .decay = decay};
             return std::unique_ptr<BoundLowRank>(
                 new BoundLowRank{shape, std::move(gradients), residuals, stored, pool.pool});
           }),
           py::arg("pool"), py::arg("rows"), py::arg("columns"), py::arg("rank"), py::arg("gradients"),
           py::arg("dtype"), py::arg("residuals"), py::arg("factor"), py::arg("decay"), py::arg("stored"),
           py::keep_alive<1, 2>())
      .def(
          "project_rows",
          [](const BoundLowRank& m, Address q, Address x, Address stored) {
            for (size_t k = 0; k < m.gradients.size(); ++k)
              project_rows(m.pool, m.at(k), m.columns_of(q, k), const_cast<float*>(m.rows_of(x, k)),
                           m.matrix_of(stored, k));
          },
          py::arg("q"), py::arg("x"), py::arg("stored"), Unlocked(), "x = q M^T; M goes to `stored`, unless it is 0.")
      .def(
          "project_columns",
          [](const BoundLowRank& m, Address p, Address x) {
            for (size_t k = 0; k < m.gradients.size(); ++k)
              project_columns(m.pool, m.at(k), m.rows_of(p, k), const_cast<float*>(m.columns_of(x, k)));
          },
          py::arg("p"), py::arg("x"), Unlocked(), "x = p M.")
      .def(
          "split",
          [](const BoundLowRank& m, std::pair<Address, Address> own, std::pair<Address, Address> result, float scale,
             Address left, const std::vector<Address>& out) {
            for (size_t k = 0; k < m.gradients.size(); ++k)
              split_product(m.pool, m.at(k), {m.rows_of(own.first, k), m.columns_of(own.second, k)},
                            {m.rows_of(result.first, k), m.columns_of(result.second, k)}, scale, m.matrix_of(left, k),
                            reinterpret_cast<void*>(out.at(k)), m.shape.dtype);
          },
          py::arg("own"), py::arg("result"), py::arg("scale"), py::arg("left"), py::arg("out"), Unlocked(),
          "left = M - own, out = scale * result; `out` may be where the gradients are.");
  module.def(
      "make_orthonormal",
      [](Address factors, size_t matrices, uint32_t rank, size_t size, Address starts) {
        for (size_t k = 0; k < matrices; ++k)
          make_orthonormal({reinterpret_cast<float*>(factors) + k * rank * size, rank * size}, rank,
                           {reinterpret_cast<const float*>(starts) + k * rank * size, rank * size});
      },
      py::arg("factors"), py::arg("matrices"), py::arg("rank"), py::arg("size"), py::arg("starts"), Unlocked(),
      "Makes the rows of stacked factors orthonormal, in place.");
}

}  // namespace gradwire::python
