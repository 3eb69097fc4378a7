// SPDX-License-Identifier: Apache-2.0
// Types and addresses of tensors as C programs give them.
#pragma once

#include <cstdint>
#include <vector>

#include "c/boundary.h"
#include "gradwire/collective.h"

namespace gradwire::c_api {

inline DType dtype_of(int number) {
  if (number != GW_F32 && number != GW_F16 && number != GW_BF16)
    refuse_usage("dtype is " + std::to_string(number) + "; allowed are GW_F32, GW_F16 and GW_BF16", "dtype");
  return static_cast<DType>(number);
}

// The addresses of all tensors. No elements need no memory, and get an address that no loop over nothing reads. The
// loops over elements want them where the compiler would put them.
template <class Pointer>
std::vector<Pointer> elements_of(const std::vector<NamedTensor>& tensors, const Pointer* list, const char* what) {
  alignas(8) static std::byte nothing[8];
  std::vector<Pointer> elements(tensors.size(), nothing);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].count == 0) continue;
    const auto refuse = [&](const std::string& why) {
      refuse_usage(std::string(what) + "[" + std::to_string(i) + "], of tensor '" + tensors[i].name + "', " + why,
                   what);
    };
    elements[i] = given(list, what)[i];
    if (!elements[i]) refuse("is a null pointer");
    if (const size_t bytes = bytes_of(tensors[i].dtype); reinterpret_cast<uintptr_t>(elements[i]) % bytes != 0)
      refuse("is not aligned to its elements of " + std::to_string(bytes) + " bytes");
  }
  return elements;
}

}  // namespace gradwire::c_api
