// SPDX-License-Identifier: Apache-2.0
// What a worker does with words of a server that it cannot use. Whatever a server says, only an Error comes out.
#include <gtest/gtest.h>

#include <deque>

#include "gradwire/error.h"
#include "server/client.h"

namespace gradwire::server {
namespace {

// Says its lines one after another; then the connection is gone.
class ScriptedLink final : public Link {
 public:
  explicit ScriptedLink(std::deque<std::pair<FrameKind, std::string>> lines) : lines_(std::move(lines)) {}
  void send(const Frame&, const Blob&) override {}
  bool receive(Frame& frame, Blob& payload, std::chrono::milliseconds) override {
    if (lines_.empty()) throw LinkLost("the script is over");
    const auto bytes = std::as_bytes(std::span(lines_.front().second));
    frame = {.kind = lines_.front().first};
    payload = make_blob({bytes.begin(), bytes.end()});
    lines_.pop_front();
    return true;
  }

 private:
  std::deque<std::pair<FrameKind, std::string>> lines_;
};

constexpr const char* kWelcome =
    R"({"run":1,"slot":0,"initial":false,"durable":[0],"steps":0,"part_elements":64,"async":false,)"
    R"("sequence":[0],"versions":[0]})";

// The words of the error with which joining ends.
std::string joined(std::deque<std::pair<FrameKind, std::string>> lines) {
  Signature signature;
  signature.parameters = {{"w", {16}}};
  signature.up = signature.down = "fp32";
  std::vector<float> values(16);
  float* const weights[] = {values.data()};
  Client client({.signature = signature,
                 .dial = [&] { return std::make_unique<ScriptedLink>(lines); },
                 .name = "",
                 .id = "worker-0",
                 .patience_s = 1e-9});
  try {
    client.join(weights);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ClientMalformed, TextsOfOtherTypesAreNoNews) {
  for (const char* notice : {R"({"left":"yes"})", R"({"left":[true]})", R"({"left":1})", R"({"left":null})", "{}"})
    EXPECT_NE(joined({{FrameKind::welcome, kWelcome}, {FrameKind::notice, notice}}).find("the script is over"),
              std::string::npos)
        << notice;
  for (const char* durable : {R"({"durable":"all"})", R"({"durable":[-1]})", R"({"durable":[[1]]})", "{}"})
    EXPECT_NE(joined({{FrameKind::welcome, kWelcome}, {FrameKind::durable, durable}}).find("the script is over"),
              std::string::npos)
        << durable;
}

TEST(ClientMalformed, WhatIsNoTextIsAnError) {
  for (const FrameKind kind : {FrameKind::notice, FrameKind::durable})
    for (const char* text : {"", "[]", "{", "\xff"})
      EXPECT_NE(joined({{FrameKind::welcome, kWelcome}, {kind, text}}).find("bad frame: text"), std::string::npos)
          << text;
}

TEST(ClientMalformed, AWelcomeLacksNothing) {
  const std::string honest = kWelcome;
  for (const char* field : {"run", "slot", "initial", "durable", "part_elements", "async", "sequence", "versions"}) {
    std::string welcome = honest;
    welcome.replace(welcome.find(field), 1, "x");
    EXPECT_NE(joined({{FrameKind::welcome, welcome}}).find("bad welcome"), std::string::npos) << field;
  }
}

}  // namespace
}  // namespace gradwire::server
