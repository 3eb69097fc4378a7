// SPDX-License-Identifier: Apache-2.0
// What a plan of a C program holds: the rules, the tensors, and for each tensor the codec that messages have. A reducer
// takes the rules and the tensors. The runner of the messages is made by the first encoding and kept until the plan
// changes.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/factor_plan.h"
#include "gradwire.h"
#include "gradwire/collective.h"
#include "gradwire/rules.h"
#include "gradwire/runner.h"

struct gw_plan {
  explicit gw_plan(const char* codec)
      : text(codec), messages(gradwire::without_lowrank(text)), rules(gradwire::Rules::parse(messages)) {}
  // Messages have no lowrank, only reducers do.
  bool has_lowrank() const { return text != messages; }

  std::string text, messages;
  gradwire::Rules rules;  // of messages: the text with fp32 in place of lowrank
  std::vector<gradwire::NamedTensor> tensors;
  std::vector<gradwire::Codec> codecs;   // by tensor, with what they were fitted to
  std::optional<gradwire::Plan> layout;  // of the messages; the runner refers to it
  std::unique_ptr<gradwire::Runner> runner;
};
