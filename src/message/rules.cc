// SPDX-License-Identifier: Apache-2.0
// Per-tensor rules: which codec carries which tensor. `pattern=spec` parts, separated by `;`, are tried from left to
// right and the last one is `*`, so every tensor has exactly one codec. A spec has `=` in it too ("name:key=value"),
// but only after its `:`, and that tells a plain spec from a rule.
#include "gradwire/rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "codec/define.h"
#include "gradwire/error.h"
#include "message/rule_text.h"

namespace gradwire {
namespace {

constexpr std::string_view kOneDimension = "1d", kMatrix = "2d";

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

[[noreturn]] void refuse(size_t number, std::string_view rule, const std::string& why, const std::string& field) {
  throw Error(ErrorKind::usage, fmt::format("rule {} '{}': {}", number, rule, why), field);
}

bool plain_spec(std::string_view text) {
  if (text.find(';') != std::string_view::npos) return false;
  return text.find('=') == std::string_view::npos || text.find(':') < text.find('=');
}

// `*` any run of characters, `?` any one. On a mismatch only the last `*` is tried again one character further, so
// the time is bounded by the product of the two lengths.
bool glob(std::string_view pattern, std::string_view name) {
  size_t p = 0, n = 0, star = std::string_view::npos, resume = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

// The bound of a rule `<COUNT`; 0: another kind of rule.
uint64_t below(size_t number, std::string_view rule, std::string_view pattern) {
  if (!pattern.starts_with('<')) return 0;
  uint64_t bound = 0;
  const char* const end = pattern.data() + pattern.size();
  const auto [stop, error] = std::from_chars(pattern.data() + 1, end, bound);
  if (error != std::errc() || stop != end || bound == 0)
    refuse(number, rule, "expected a number of elements from 1 on after '<'", "rules");
  return bound;
}

}  // namespace

std::vector<RuleText> rule_texts(std::string_view text) {
  text = trimmed(text);
  if (plain_spec(text)) return {{1, text, "*", text}};
  std::vector<RuleText> rules;
  for (size_t number = 1, begin = 0; begin <= text.size(); ++number) {
    const size_t end = std::min(text.find(';', begin), text.size());
    const std::string_view rule = trimmed(text.substr(begin, end - begin));
    const bool last = end == text.size();
    begin = end + 1;
    const size_t equals = rule.find('=');
    const std::string_view pattern = trimmed(rule.substr(0, equals));
    if (last && pattern != "*")
      refuse(number, rule, "the last rule must be '*=SPEC', so that every tensor has a codec", "rules");
    if (equals == std::string_view::npos || pattern.empty())
      refuse(number, rule, "expected PATTERN=SPEC, where PATTERN is '1d', '2d', '<COUNT' or a name with * and ?",
             "rules");
    if (!last && pattern == "*") refuse(number, rule, "'*' matches every tensor: it must be the last rule", "rules");
    rules.push_back({number, rule, pattern, trimmed(rule.substr(equals + 1))});
  }
  return rules;
}

void RuleText::parse(const std::function<void(std::string_view spec)>& body) const {
  if (text == spec) return body(spec);  // a codec alone
  try {
    body(spec);
  } catch (const Error& error) {
    refuse(number, text, error.what(), error.field());
  }
}

Rules Rules::parse(std::string_view text) {
  Rules rules;
  for (const RuleText& rule : rule_texts(text)) {
    rule.parse([&](std::string_view spec) {
      rules.rules_.push_back(
          {std::string(rule.pattern), Codec::parse(spec), below(rule.number, rule.text, rule.pattern)});
    });
  }
  return rules;
}

std::string Rules::str() const {
  if (rules_.size() == 1) return rules_.front().codec.str();
  std::string text;
  for (const Rule& rule : rules_)
    text += fmt::format("{}{}={}", text.empty() ? "" : ";", rule.pattern, rule.codec.str());
  return text;
}

Rules Rules::nearest() const {
  Rules rules = *this;
  for (Rule& rule : rules.rules_) rule.codec = nearest_of(rule.codec);
  return rules;
}

Codec Rules::codec_for(std::string_view name, int dimensions, uint64_t count) const {
  return rules_[number_for(name, dimensions, count)].codec;
}

size_t Rules::number_for(std::string_view name, int dimensions, uint64_t count) const {
  for (const Rule& rule : rules_)
    if (rule.below                      ? count < rule.below
        : rule.pattern == kOneDimension ? dimensions <= 1
        : rule.pattern == kMatrix       ? dimensions >= 2
                                        : glob(rule.pattern, name))
      return static_cast<size_t>(&rule - rules_.data());
  throw Error(ErrorKind::usage, fmt::format("tensor '{}': no rule; rules come from Rules::parse", name), "rules");
}

}  // namespace gradwire
