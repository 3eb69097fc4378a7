// SPDX-License-Identifier: Apache-2.0
// A worker that says whatever a test wants it to say, without a network.
#pragma once

#include "server/server_fixture.h"

namespace gradwire::server {

inline Blob words(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return make_blob({bytes.begin(), bytes.end()});
}

// A session that can send any frame.
class UntrustedWorker {
 public:
  explicit UntrustedWorker(ServerFixture& server) : server_(server) {}
  ~UntrustedWorker() { server_.hub()->vanished(session_.get()); }

  void say(const Frame& frame, Blob payload) {
    ++said_;
    EXPECT_NO_THROW(
        server_.hub()->received(session_, frame, payload ? payload : make_blob({}), [read = read_] { ++*read; }));
  }
  void hello(const Signature& signature, const std::string& id = "stranger0") {
    say({.kind = FrameKind::hello}, text_blob({{"id", id}, {"name", ""}, {"signature", signature.json()}}));
  }
  // Everything that was said has been read, and the session may say more.
  bool read() const {
    return eventually([&] { return *read_ == said_; });
  }
  // The next answer of a kind.
  bool hears(FrameKind kind, Frame& frame, Blob& payload) {
    try {
      while (session_->receive(frame, payload, 120s))
        if (frame.kind == kind) return true;
    } catch (const std::exception& error) {
      refusal_ = error.what();
    }
    return false;
  }
  bool hears(FrameKind kind) {
    Frame frame;
    Blob payload;
    return hears(kind, frame, payload);
  }
  bool refused() {
    Frame frame;
    Blob payload;
    try {
      while (session_->receive(frame, payload, 0ms)) {
      }
    } catch (const std::exception& error) {
      refusal_ = error.what();
    }
    return !refusal_.empty();
  }
  const std::string& refusal() const { return refusal_; }

 private:
  ServerFixture& server_;
  std::shared_ptr<LocalSession> session_ = std::make_shared<LocalSession>();
  std::shared_ptr<std::atomic<int>> read_ = std::make_shared<std::atomic<int>>(0);
  int said_ = 0;
  std::string refusal_;
};

inline Blob message_of(const Signature& signature, size_t shard, float fill, ShardMessage kind = ShardMessage::up) {
  const ShardLayout layout = shard_layouts(signature, 32768)[shard];
  const Plan plan(specs_of(signature, layout, kind));
  const auto runner = make_runner(plan, {});
  std::vector<float> values(layout.elements(), fill);
  std::vector<const void*> in;
  const float* at = values.data();
  for (const ParameterRange& range : layout.ranges) {
    in.push_back(at);
    at += range.count;
  }
  std::vector<std::byte> message(plan.message_bytes());
  runner->encode(in, {}, message);
  return make_blob(std::move(message));
}

}  // namespace gradwire::server
