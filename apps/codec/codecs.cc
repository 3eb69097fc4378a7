// SPDX-License-Identifier: Apache-2.0
// `gradwire codecs`: the registry as a page to read, or as JSON. Nothing is listed by hand here: what is registered is
// shown.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/console.h"
#include "gradwire/codec.h"
#include "gradwire/plan.h"

namespace gradwire::app {
namespace {

constexpr uint64_t kTypical = 1 << 20;  // elements of the tensor that "bits per element" is quoted for

double typical_bits(const Codec& codec) { return 8.0 * static_cast<double>(bound(codec, kTypical)) / kTypical; }

std::string describe(const Traits& traits) {
  std::string text = traits.lossless ? "lossless" : traits.unbiased ? "unbiased" : "biased";
  text += traits.feedback ? ", error feedback on by default" : ", error feedback off by default";
  if (traits.unit == 0) return text + ", one unit a tensor";
  if (traits.unit > 1) text += fmt::format(", units of {} elements", traits.unit);
  return text;
}

void print_json() {
  for (const CodecInfo& info : codecs()) {
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
}

void print_page() {
  size_t width = 0;
  for (const CodecInfo& info : codecs())
    for (const ParameterInfo& parameter : info.parameters)
      width = std::max(width, parameter.name.size() + 1 + parameter.fallback.size());
  print("A codec is written NAME or NAME:parameter=value,parameter=value; parameters left out take their default.\n");
  for (const CodecInfo& info : codecs()) {
    const Codec codec = Codec::parse(info.name);
    print(fmt::format("\n{}: {}\n", info.name, info.summary));
    print(fmt::format("    {:.3f} bits per element; {}\n", typical_bits(codec), describe(codec.traits())));
    for (const ParameterInfo& parameter : info.parameters) {
      print(fmt::format("    {:<{}}  {}\n", parameter.name + "=" + parameter.fallback, width, parameter.meaning));
      print(fmt::format("    {:<{}}  allowed: {}\n", "", width, parameter.allowed));
    }
    print(fmt::format("    example: {}\n", info.example));
  }
  print("\nBits per element are for one tensor of 1,048,576 elements and count every byte of its frame.\n");
}

}  // namespace

void add_codecs(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("codecs", "List every codec with its parameters, defaults and allowed values");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "One JSON object a line");
  command->footer("Example:\n  gradwire codecs");
  command->callback([&action, json] {
    action = [json] {
      if (*json) {
        print_json();
      } else {
        print_page();
      }
    };
  });
}

}  // namespace gradwire::app
