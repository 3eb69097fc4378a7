// SPDX-License-Identifier: Apache-2.0
// JSON text that comes from others: a peer or a file. The library parses any depth without recursion, but copying,
// printing and comparing a value recurse, so the depth is bounded before there is a value.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace gradwire::io {

inline constexpr size_t kMaxJsonDepth = 64;

// The value of the text. If there is none, the result is discarded (is_discarded()), and `error` says why, as the end
// of a sentence: "is nested more than 64 deep". An object that has a key twice is refused too, because two readers
// could understand it differently.
nlohmann::json parse_bounded(std::string_view text, std::string& error, size_t max_depth = kMaxJsonDepth);

}  // namespace gradwire::io
