// SPDX-License-Identifier: Apache-2.0
// Elements of a tensor in host memory, of any data type, as floats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/bits.h"
#include "gradwire/tensor.h"

namespace gradwire::app {

inline float load_value(const std::byte* data, DType dtype, uint64_t i) {
  if (dtype == DType::f32) {
    float value;
    std::memcpy(&value, data + 4 * i, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, data + 2 * i, 2);
  return dtype == DType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

inline void store_value(std::byte* data, DType dtype, uint64_t i, float value) {
  if (dtype == DType::f32) {
    std::memcpy(data + 4 * i, &value, 4);
    return;
  }
  const uint16_t bits = dtype == DType::f16 ? f32_to_f16(value) : f32_to_bf16(value);
  std::memcpy(data + 2 * i, &bits, 2);
}

}  // namespace gradwire::app
