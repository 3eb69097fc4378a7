// SPDX-License-Identifier: Apache-2.0
// libFuzzer is the server of a worker: a Client joins, exchanges updates and leaves, and everything that it hears comes
// from the input: a welcome with some bytes changed, weights with wrong fields or messages, durable, notice and buffers
// as texts of any content and depth. Only gradwire::Error may come out; another exception, a sanitizer's report or a
// call that does not return is a finding.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gradwire/error.h"
#include "gradwire/message.h"
#include "message/layout.h"
#include "server/client.h"
#include "server/fuzz_toy.h"
#include "support/fuzz_source.h"

namespace {

using namespace gradwire;
using namespace gradwire::server;
using namespace gradwire::fuzz;

// Says what the input says, and then the connection is gone.
class FuzzLink final : public Link {
 public:
  FuzzLink(Source& source, const Signature& signature)
      : source_(source), signature_(signature), layouts_(shard_layouts(signature, kShardElements)) {}
  void send(const Frame& frame, const Blob& payload) override {
    const size_t size = payload ? payload->size() : 0;
    read_frame_head(write_head(frame, size), size);  // what a worker says, a server can read
    last_ = frame;
  }
  bool receive(Frame& frame, Blob& payload, std::chrono::milliseconds) override {
    if (source_.size == 0) throw LinkLost("the input is over");
    frame = {};
    payload = make_blob({});
    switch (source_.next<uint8_t>() % 8) {
      case 0:
        frame.kind = FrameKind::welcome;
        payload = blob_of(welcome());
        break;
      case 1:
        frame.kind = FrameKind::welcome;
        payload = blob_of(altered(source_, welcome()));
        break;
      case 2:
        frame.kind = FrameKind::durable;
        payload = blob_of(altered(source_, R"({"durable":[1,2]})"));
        break;
      case 3:
        frame.kind = FrameKind::notice;
        payload = blob_of(altered(source_, R"({"left":true})"));
        break;
      case 4:
        frame.kind = FrameKind::buffers;
        payload = encode(buffer_specs(signature_), 1);
        break;
      case 5:  // any kind, a text of any depth
        frame.kind = static_cast<FrameKind>(source_.next<uint8_t>() % 5 + 65);
        payload = blob_of(nested_json(source_));
        break;
      default:
        answer(frame, payload);
        break;
    }
    // A link gives out only what the head of a frame can say.
    try {
      frame = read_frame_head(write_head(frame, payload->size()), payload->size());
    } catch (const Error& error) {
      throw LinkLost(error.what());
    }
    return true;
  }

 private:
  std::string welcome() {
    std::vector<uint64_t> numbers(layouts_.size(), source_.next<uint8_t>() % 3);
    const auto flags = source_.next<uint8_t>();
    return nlohmann::json{{"run", flags % 3},           {"slot", 1},           {"initial", (flags & 16) != 0},
                          {"durable", numbers},         {"steps", flags % 5},  {"part_elements", kShardElements},
                          {"async", (flags & 32) != 0}, {"sequence", numbers}, {"versions", numbers}}
        .dump();
  }
  // To the last question, more or less.
  void answer(Frame& frame, Blob& payload) {
    const auto how = source_.next<uint8_t>();
    frame.kind = FrameKind::weights;
    frame.shard = how & 1 ? last_.shard : source_.next<uint8_t>() % 5;
    frame.step = how & 2 ? last_.step + 1 : source_.next<uint8_t>();
    frame.sequence = how & 4 ? last_.sequence : source_.next<uint8_t>();
    frame.status = static_cast<UpdateStatus>(how & 8 ? 1 : source_.next<uint8_t>() % 6);
    frame.flags = source_.next<uint8_t>() % 8;
    frame.held = source_.next<uint8_t>();
    if (how & 16) return;
    const auto kind = frame.flags & kWhole ? ShardMessage::whole : ShardMessage::down;
    const ShardLayout& layout = layouts_[frame.shard % layouts_.size()];
    payload = encode(specs_of(signature_, layout, kind), 0.5f);
    if (how & 128) learned(frame, payload, layout);
    if (!(how & 32)) return;
    std::vector<std::byte> bytes = *payload;
    bytes[source_.next<uint16_t>() % bytes.size()] ^= std::byte(source_.next<uint8_t>());
    if (how & 64) reseal(bytes);
    payload = make_blob(std::move(bytes));
  }

  // What the codecs have learned, with some words changed.
  void learned(Frame& frame, Blob& payload, const ShardLayout& layout) {
    std::vector<std::byte> state =
        ShardLearning(specs_of(signature_, layout, ShardMessage::up), Direction::up, run_of(signature_, layout, false))
            .save();
    const auto how = source_.next<uint8_t>();
    if (how & 8) state.resize(state.size() + how / 16 * 8);
    for (int i = 0; i < how % 8 && state.size() >= 8; ++i) {
      const size_t word = source_.next<uint8_t>() % (state.size() / 8);
      const uint64_t number = source_.next<uint8_t>() % 2 ? source_.next<uint64_t>() : source_.next<uint8_t>();
      std::memcpy(state.data() + 8 * word, &number, sizeof number);
    }
    std::vector<std::byte> both = *payload;
    both.insert(both.end(), state.begin(), state.end());
    frame.tail = state.size();
    payload = make_blob(std::move(both));
  }

  Source& source_;
  Signature signature_;
  std::vector<ShardLayout> layouts_;
  Frame last_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Source source{data, size};
  const auto flags = source.next<uint8_t>();
  const Signature signature = toy_signature(flags & 8 ? learning_codec(flags / 16) : "fp32",
                                            flags & 1 ? "unigrid:bits=8" : "fp32", flags & 2, flags & 4);
  std::vector<std::vector<float>> values, updates, buffers{std::vector<float>(3)};
  std::vector<float*> weights, second, kept{buffers[0].data()};
  std::vector<const float*> sent;
  for (const Variable& one : signature.parameters) {
    weights.push_back(values.emplace_back(one.count(), 1.0f).data());
    sent.push_back(updates.emplace_back(one.count(), 0.25f).data());
  }
  try {
    Client client({.signature = signature,
                   .dial = [&] { return std::make_unique<FuzzLink>(source, signature); },
                   .name = "fuzz",
                   .id = "fuzzed-worker",
                   .patience_s = 1e-9});
    client.join(weights);
    for (int i = 0; i < 4; ++i) {
      client.exchange(sent, weights);
      client.take_buffers(kept);
      if (signature.pools) client.pool(weights);
    }
    client.leave(0.01);
  } catch (const Error& error) {
    promise(*error.what() != '\0');
  }
  return 0;
}
