// SPDX-License-Identifier: Apache-2.0
#include "collective/feedback_rule.h"

#include <fmt/format.h>

#include "gradwire/error.h"

namespace gradwire {

using Feedback = ReduceOptions::Feedback;

bool wants_residual(const Codec& codec, Feedback choice) {
  const Traits traits = codec.traits();
  if (traits.lossless || choice == Feedback::off) return false;
  return choice == Feedback::on || traits.feedback || (choice == Feedback::momentum && traits.momentum);
}

std::string_view name_of(Feedback choice) {
  switch (choice) {
    case Feedback::codec:
      return "codec";
    case Feedback::on:
      return "on";
    case Feedback::off:
      return "off";
    case Feedback::momentum:
      return "momentum";
  }
  return "";
}

Feedback parse_feedback(std::string_view name) {
  for (const Feedback choice : {Feedback::codec, Feedback::on, Feedback::off, Feedback::momentum})
    if (name == name_of(choice)) return choice;
  throw Error(ErrorKind::usage,
              fmt::format("feedback is '{}'; allowed is codec, on, off, momentum", name.substr(0, 32)), "feedback");
}

Feedback owner_feedback_for(Feedback choice) { return choice == Feedback::off ? Feedback::off : Feedback::on; }

}  // namespace gradwire
