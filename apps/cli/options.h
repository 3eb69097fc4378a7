// SPDX-License-Identifier: Apache-2.0
// Options that several commands share. They are declared once, so that their names, descriptions and ranges are the
// same everywhere.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <string>
#include <vector>

#include "bench/backend.h"
#include "bench/measure.h"

namespace gradwire::app {

inline constexpr uint64_t kMostElements = uint64_t{1} << 40;

// A whole number within bounds. The check reads the text itself, because the parser's conversion would wrap a minus
// sign.
template <class T>
CLI::Option* add_whole(CLI::App& app, const std::string& name, T& value, std::type_identity_t<T> low,
                       std::type_identity_t<T> high, const std::string& meaning) {
  const auto check = [low, high](const std::string& text) -> std::string {
    T number{};
    const char* end = text.data() + text.size();
    const auto result = std::from_chars(text.data(), end, number);
    if (result.ec == std::errc() && result.ptr == end && number >= low && number <= high) return {};
    return fmt::format("'{}' is not allowed; expected a whole number from {} to {}", text, low, high);
  };
  return app.add_option(name, value, meaning)->check(check)->type_name("N")->capture_default_str();
}

inline CLI::Option* add_choice(CLI::App& app, const std::string& name, std::string& value,
                               const std::vector<std::string>& allowed, const std::string& meaning) {
  const auto check = [allowed](const std::string& text) -> std::string {
    for (const std::string& choice : allowed)
      if (text == choice) return {};
    return fmt::format("'{}' is not allowed; expected {}", text, fmt::join(allowed, ", "));
  };
  return app.add_option(name, value, meaning)
      ->check(check)
      ->type_name(fmt::format("{}", fmt::join(allowed, "|")))
      ->capture_default_str();
}

inline CLI::Option* add_file(CLI::App& app, const std::string& name, std::string& value, const std::string& meaning) {
  return app.add_option(name, value, meaning)->type_name("")->required();
}

inline CLI::Option* add_codec(CLI::App& app, std::vector<std::string>& value, const std::string& meaning) {
  return app.add_option("--codec", value, meaning)->type_name("SPEC")->allow_extra_args(false)->capture_default_str();
}

inline void add_simd(CLI::App& app, std::string& value) {
  app.add_option("--simd", value, "CPU vector instructions: a target that gradwire doctor lists, or scalar")
      ->type_name("TARGET");
}

// --device, --threads, --simd.
inline void add_device(CLI::App& app, BackendOptions& backend) {
  add_choice(app, "--device", backend.device, {"cpu", "cuda"}, "Device that computes; the bytes do not depend on it");
  add_whole(app, "--threads", backend.threads, 1, 1024, "CPU threads; the bytes do not depend on them");
  add_simd(app, backend.simd);
}

}  // namespace gradwire::app
