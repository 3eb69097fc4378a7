// SPDX-License-Identifier: Apache-2.0
// NumPy's .npy files, as far as gradients need them: little-endian f32 and f16 arrays of any shape. A file is a magic
// string, a version, the length of a header, the header (a Python dictionary literal with `descr`, `fortran_order` and
// `shape`) and the elements. Elements are taken in the order they are stored, so a Fortran-ordered array is flattened
// in its own order. Input is treated as hostile: every length is checked against the file before it is believed.
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
  std::span<const std::byte> data;  // a view into the file
};

bool looks_like_npy(std::span<const std::byte> file);

// Error{frame} for a damaged file, Error{usage} for an element type that is not supported; both name the field.
NpyArray parse_npy(std::span<const std::byte> file, const std::string& path);

// The header of a one-dimensional array of f32 or f16.
std::vector<std::byte> npy_header(DType dtype, uint64_t count);

}  // namespace gradwire::app
