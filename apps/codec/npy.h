// SPDX-License-Identifier: Apache-2.0
// NumPy's .npy files, as far as gradients need them: little-endian f32 and f16 arrays of any shape. A file is a magic
// string, a version, the length of a header, the header (a Python dictionary literal with `descr`, `fortran_order` and
// `shape`) and the elements. Files may come from anywhere: every length is checked against the file before it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gradwire/tensor.h"

namespace gradwire::app {

struct NpyArray {
  DType dtype = DType::f32;
  bool fortran_order = false;
  std::vector<uint64_t> shape;
  uint64_t count = 0;
  std::span<const std::byte> data;  // a view into the file, in the order of the file
};

bool looks_like_npy(std::span<const std::byte> file);

// Error{frame} unless the first bytes of a file are those of a .npy file.
void expect_npy(std::span<const std::byte> first, const std::string& path);

// Error{frame} for a damaged file, Error{usage} for an element type that is not supported; both name the field.
NpyArray parse_npy(std::span<const std::byte> file, const std::string& path);

// The elements of a Fortran-ordered array (first index fastest) in C order (last index fastest).
std::vector<std::byte> in_c_order(const NpyArray& array);

// The header of an array of f32 or f16 in C order; an empty shape is that of a scalar.
std::vector<std::byte> npy_header(DType dtype, std::span<const uint64_t> shape);

}  // namespace gradwire::app
