// SPDX-License-Identifier: Apache-2.0
// Element types of tensors. Codecs compute in f32 whatever the tensor's own type is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace gradwire {

// The numbers are wire format: they stand in the tensor table of every message.
enum class DType : uint8_t { f32 = 0, f16 = 1, bf16 = 2 };

constexpr size_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }
std::string_view name_of(DType dtype);
DType parse_dtype(std::string_view name);  // throws Error{usage}

}  // namespace gradwire
