// SPDX-License-Identifier: Apache-2.0
#include "gradwire/tensor.h"

#include <fmt/format.h>

#include "gradwire/error.h"

namespace gradwire {

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
  }
  return "?";
}

DType parse_dtype(std::string_view name) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16})
    if (name == name_of(dtype)) return dtype;
  throw Error(ErrorKind::usage, fmt::format("dtype is '{}'; allowed are f32, f16 and bf16", name), "dtype");
}

}  // namespace gradwire
