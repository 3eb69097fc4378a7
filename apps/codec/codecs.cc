// SPDX-License-Identifier: Apache-2.0
// `gradwire codecs`: the registry as a table, one codec with its parameters, or all of it as JSON. Nothing is listed by
// hand: what is registered is shown.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/console.h"
#include "gradwire/codec.h"
#include "gradwire/error.h"
#include "gradwire/plan.h"

namespace gradwire::app {
namespace {

constexpr uint64_t kTypical = 1 << 20;  // elements of the tensor that "bits per element" is quoted for

double typical_bits(const Codec& codec) { return 8.0 * static_cast<double>(bound(codec, kTypical)) / kTypical; }

std::string kind_of(const Traits& traits) {
  return traits.lossless ? "lossless" : traits.unbiased ? "unbiased" : "biased";
}

// Error feedback with Adam's momentum may depend on how many bits a codec sends. A codec that has no such parameter, or
// not with this value, refuses it.
bool has_momentum_feedback(const std::string& spec) {
  try {
    return Codec::parse(spec).traits().momentum;
  } catch (const Error&) {
    return false;
  }
}

// The parameters with which the codec has error feedback with Adam's momentum, and not otherwise: "bits=2 and bits=3".
std::string only_with_momentum(const std::string& name) {
  std::string found;
  for (const char* parameter : {"bits", "budget"})
    for (int value = 1; value <= 8; ++value)
      if (const std::string text = fmt::format("{}={}", parameter, value); has_momentum_feedback(name + ":" + text))
        found += (found.empty() ? "" : " and ") + text;
  return found;
}

std::string feedback_of(const std::string& name, const Traits& traits) {
  if (traits.feedback) return "on by default";
  const std::string with_momentum = only_with_momentum(name);
  return "off by default" + (with_momentum.empty() ? "" : " (on with Adam's momentum for " + with_momentum + ")");
}

std::string describe(const std::string& name, const Traits& traits) {
  std::string text = kind_of(traits);
  text += ", error feedback " + feedback_of(name, traits);
  if (traits.unit == 0) return text + ", one unit per tensor";
  if (traits.unit > 1) text += fmt::format(", units of {} elements", traits.unit);
  return text;
}

void print_json(const CodecInfo& info) {
  const Codec codec = Codec::parse(info.name);
  const Traits traits = codec.traits();
  nlohmann::ordered_json row = {
      {"codec", info.name},          {"summary", info.summary},     {"example", info.example},
      {"spec", codec.str()},         {"lossless", traits.lossless}, {"unbiased", traits.unbiased},
      {"feedback", traits.feedback}, {"unit", traits.unit},         {"bits_per_element", typical_bits(codec)}};
  row["parameters"] = nlohmann::ordered_json::array();
  for (const ParameterInfo& parameter : info.parameters)
    row["parameters"].push_back({{"name", parameter.name},
                                 {"default", parameter.fallback},
                                 {"allowed", parameter.allowed},
                                 {"meaning", parameter.meaning}});
  print(row.dump() + "\n");
}

void print_table() {
  print("A codec is written NAME or NAME:parameter=value,parameter=value. Parameters left out have their default.\n\n");
  ConsoleTable table("lrrlll", {"codec", "bits/element", "ratio", "kind", "error feedback", "what is sent"});
  for (const CodecInfo& info : codecs()) {
    const Codec codec = Codec::parse(info.name);
    const double bits = typical_bits(codec);
    table.row({info.name, fmt::format("{:.2f}", bits), fmt::format("{:.1f}", 32 / bits), kind_of(codec.traits()),
               codec.traits().feedback                 ? "on"
               : only_with_momentum(info.name).empty() ? "off"
                                                       : "momentum",
               info.summary});
  }
  print(table.str());
  print(
      "\nBits per element and ratio (fp32 bytes / bytes sent) are for default parameters and one tensor of 1,048,576 "
      "elements.\n"
      "Error feedback: momentum means off, and on for few bits where Adam's momentum is exchanged.\n"
      "gradwire codecs NAME shows the parameters of one codec.\n"
      "lowrank:rank=4,bits=8,alternate=off is no codec of messages: it sends matrices as two thin factors where they\n"
      "are reduced, as in gradwire train.\n");
}

void print_codec(const CodecInfo& info) {
  const Codec codec = Codec::parse(info.name);
  const double bits = typical_bits(codec);
  print(fmt::format("{}: {}\n", info.name, info.summary));
  print(fmt::format("    {:.3f} bits per element (ratio {:.2f}) by default; {}\n", bits, 32 / bits,
                    describe(info.name, codec.traits())));
  if (!info.parameters.empty()) print("\n");
  size_t width = 0;
  for (const ParameterInfo& parameter : info.parameters)
    width = std::max(width, parameter.name.size() + 1 + parameter.fallback.size());
  for (const ParameterInfo& parameter : info.parameters) {
    print(fmt::format("    {:<{}}  {}\n", parameter.name + "=" + parameter.fallback, width, parameter.meaning));
    print(fmt::format("    {:<{}}  allowed: {}\n", "", width, parameter.allowed));
  }
  print(fmt::format("\n    example: {}\n", info.example));
}

// One codec, or all of them.
void print_codecs(const std::string& name, bool json) {
  if (name.empty() && !json) return print_table();
  const std::string chosen = name.empty() ? "" : Codec::parse(name).name();  // refuses a name that is not registered
  for (const CodecInfo& info : codecs()) {
    if (!name.empty() && info.name != chosen) continue;
    if (json) {
      print_json(info);
    } else {
      print_codec(info);
    }
  }
}

}  // namespace

void add_codecs(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("codecs", "List the codecs, or show the parameters of one");
  struct CodecsOptions {
    std::string name;
    bool json = false;
  };
  auto options = std::make_shared<CodecsOptions>();
  command->add_option("NAME", options->name, "Codec whose parameters, defaults and allowed values are shown")
      ->type_name("");
  command->add_flag("--json", options->json, "Print one JSON object per codec, with all parameters");
  command->footer("Examples:\n  gradwire codecs\n  gradwire codecs qsgd");
  command->callback([&action, options] { action = [options] { print_codecs(options->name, options->json); }; });
}

}  // namespace gradwire::app
