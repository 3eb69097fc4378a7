// SPDX-License-Identifier: Apache-2.0
#include "io/json.h"

#include <fmt/format.h>

#include <set>
#include <vector>

#include "io/safetensors.h"

namespace gradwire::io {

using nlohmann::json;

json parse_bounded(std::string_view text, std::string& error, size_t max_depth) {
  // To the JSON library a zero is the end of the text; what stands behind it would go unread.
  if (const size_t zero = text.find('\0'); zero != text.npos) {
    error = fmt::format("has a zero byte at {}", zero);
    return json(json::value_t::discarded);
  }
  struct Refused {};
  std::vector<std::set<std::string>> keys;  // of the objects and (empty) of the lists that are open
  const auto check = [&](int, json::parse_event_t event, json& parsed) {
    using Event = json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      if (keys.size() == max_depth) {
        error = fmt::format("is nested more than {} deep", max_depth);
        throw Refused();
      }
      keys.emplace_back();
    } else if (event == Event::object_end || event == Event::array_end) {
      keys.pop_back();
    } else if (event == Event::key && !keys.back().insert(parsed.get<std::string>()).second) {
      error = fmt::format("has {} twice in one object", shown(parsed.get<std::string>()));
      throw Refused();
    }
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const Refused&) {
  } catch (const json::parse_error& failure) {
    error = fmt::format("is no JSON from byte {} on", failure.byte);
  } catch (const json::exception&) {
    error = "has a number that no double holds";
  }
  return json(json::value_t::discarded);
}

}  // namespace gradwire::io
