// SPDX-License-Identifier: Apache-2.0
#include "collective/factor_plan.h"

#include <fmt/format.h>

#include "core/refuse.h"
#include "gradwire/error.h"
#include "message/rule_text.h"

namespace gradwire {
namespace {

// The rules, each with its lowrank where it has one.
struct LowRankRules {
  std::string without, text;
  std::vector<std::optional<LowRank>> rules;
  bool any = false;
};

LowRankRules parse(const std::string& text) {
  LowRankRules parsed;
  const std::vector<RuleText> texts = rule_texts(text);
  for (const RuleText& rule : texts) {
    std::optional<LowRank> found;
    std::string canonical, other = "fp32";
    rule.parse([&](std::string_view spec) {
      if (is_lowrank(spec)) found = LowRank::parse(spec);
      canonical = found ? found->str() : Codec::parse(spec).str();
      if (!found) other = canonical;
    });
    const bool alone = texts.size() == 1;
    const auto add = [&](std::string& to, const std::string& spec) {
      if (!to.empty()) to += ';';
      to += alone ? spec : fmt::format("{}={}", rule.pattern, spec);
    };
    add(parsed.text, canonical);
    add(parsed.without, other);
    parsed.any |= found.has_value();
    parsed.rules.push_back(found);
  }
  return parsed;
}

// What would have no effect, or another one than the caller expects.
void check_options(const ReduceOptions& options) {
  if (options.nodes != 0)
    throw Error(ErrorKind::unsupported, fmt::format("nodes is {}; lowrank works on one level", options.nodes), "nodes");
  if (options.device.kind == Device::Kind::cuda)
    throw Error(ErrorKind::unsupported,
                "lowrank of a Reducer computes on the CPU; on a GPU it works in the hook of PyTorch's "
                "DistributedDataParallel",
                "device");
  if (!options.down.empty())
    refuse_usage(
        fmt::format("down is '{}'; with lowrank the means of factors go back as the factors came", options.down),
        "down");
  if (options.feedback == ReduceOptions::Feedback::off)
    refuse_usage("feedback is off; without it, what lowrank leaves out would be lost for ever", "feedback");
  if (options.residual != DType::f32)
    throw Error(ErrorKind::unsupported,
                fmt::format("residual is {}; lowrank computes with its residuals, and keeps them in f32",
                            name_of(options.residual)),
                "residual");
}

// Whether a tensor for which lowrank was chosen is a matrix whose factors are worth sending.
bool factored(const NamedTensor& tensor, const LowRank& codec) {
  if (tensor.dimensions < 2 || tensor.count == 0) return false;
  if (tensor.rows == 0)
    refuse_usage(
        fmt::format("tensor '{}' has lowrank, and its number of rows is not known: set NamedTensor::rows (in C, "
                    "gw_plan_add_matrix) to its first extent",
                    tensor.name),
        "rows");
  if (tensor.count % tensor.rows != 0)
    refuse_usage(fmt::format("tensor '{}' has {} elements in {} rows", tensor.name, tensor.count, tensor.rows), "rows");
  if (!codec.fits(tensor.rows, tensor.count / tensor.rows)) return false;
  if (tensor.name.find_first_of("*?;=") != std::string::npos)
    refuse_usage(fmt::format("tensor '{}' has lowrank; its name must not contain '*', '?', ';' or '='", tensor.name),
                 "name");
  return true;
}

}  // namespace

std::optional<FactorPlan> FactorPlan::of(const std::vector<NamedTensor>& tensors, const ReduceOptions& options) {
  const LowRankRules parsed = parse(options.up);
  if (!parsed.any) return std::nullopt;
  check_options(options);
  const Rules rules = Rules::parse(parsed.without);
  FactorPlan plan;
  std::string factors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const NamedTensor& one = tensors[i];
    const std::optional<LowRank>& codec = parsed.rules[rules.number_for(one.name, one.dimensions, one.count)];
    if (codec && factored(one, *codec)) {
      plan.matrices.push_back({i, one.name, one.dtype, one.rows, one.count / one.rows, *codec, 0, 0});
    } else {
      plan.others.push_back(i);
      plan.tensors.push_back(one);
    }
  }
  for (FactoredMatrix& matrix : plan.matrices) {
    const auto add = [&](const char* which, uint64_t size) {
      const std::string name = fmt::format("{}/{}", matrix.name, which);
      factors += fmt::format("{}={};", name, matrix.codec.factor_codec());
      plan.tensors.push_back({.name = name, .count = matrix.codec.rank * size});
      return plan.tensors.size() - 1;
    };
    matrix.p = add("P", matrix.rows);
    matrix.q = add("Q", matrix.columns);
  }
  plan.without = rules.str();
  plan.text = parsed.text;
  // A codec alone is the rule for all.
  plan.up = factors + (plan.without.find(';') == std::string::npos ? "*=" : "") + plan.without;
  return plan;
}

std::string canonical_rules(const std::string& rules) { return parse(rules).text; }

std::string without_lowrank(const std::string& rules) {
  const LowRankRules parsed = rules.empty() ? LowRankRules{} : parse(rules);
  return parsed.any ? parsed.without : rules;
}

}  // namespace gradwire
