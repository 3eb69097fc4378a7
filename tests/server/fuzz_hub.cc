// SPDX-License-Identifier: Apache-2.0
// libFuzzer plays workers against a ServerHub: the input is a list of actions of four sessions, which say hello, bring
// first weights, update, pull, leave and vanish in any order, honestly or with wrong fields, wrong messages, other
// models and texts of any depth. Only what docs/server.md says may happen: every frame is read exactly once, a session
// is answered or refused with a reason, weights stay finite, and at the end an honest worker is still answered. An
// exception that leaves the hub, a sanitizer's report, a frame that is never read or a broken promise (trap) is a
// finding.
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gradwire/error.h"
#include "gradwire/message.h"
#include "gradwire/runner.h"
#include "message/layout.h"
#include "server/fuzz_toy.h"
#include "server/hub.h"
#include "support/fuzz_source.h"

namespace {

using namespace gradwire;
using namespace gradwire::server;
using namespace gradwire::fuzz;

constexpr size_t kSessions = 4, kMaxActions = 96;
constexpr std::chrono::seconds kHang{30};  // nothing here takes long: a frame that is not read by then never will be

Signature toy_signature(uint8_t flags) {
  const bool compressed = flags & 1, learns = flags & 8;
  return fuzz::toy_signature(learns       ? learning_codec(flags / 16)
                             : compressed ? "qsgd:bits=4"
                                          : "fp32",
                             !compressed ? "fp32"
                             : learns    ? "optquant:bits=4,refit=1"
                                         : "unigrid:bits=8",
                             flags & 2, flags & 4, flags % 8);  // runs that go on after their end, too
}

// What the hub sends to one worker.
class FuzzSession final : public Session {
 public:
  void send(const Frame& frame, const Blob& payload) override {
    const size_t size = payload ? payload->size() : 0;
    const Frame read = read_frame_head(write_head(frame, size), size);  // what it sends, a worker can read
    promise(static_cast<uint8_t>(read.kind) >= static_cast<uint8_t>(FrameKind::welcome) ||
            read.kind == FrameKind::buffers);
    if (frame.kind == FrameKind::weights && frame.shard < version.size()) version[frame.shard] = frame.step;
    if (frame.kind == FrameKind::welcome || frame.kind == FrameKind::durable || frame.kind == FrameKind::notice)
      promise(read_text(*payload).is_object());
    out_ += size;
  }
  void refuse(Refusal, const std::string& words) override {
    promise(!words.empty());
    refused = true;
  }
  std::string peer() const override { return "fuzz"; }
  uint64_t bytes_in() const override { return 0; }
  uint64_t bytes_out() const override { return out_; }

  std::atomic<bool> refused{false};
  std::array<std::atomic<uint64_t>, 4> version{};  // of the shards, as last heard
  uint64_t sequence = 0;

 private:
  std::atomic<uint64_t> out_{0};
};

// Frames that were given to the hub, and whether it has read them.
class Deliveries {
 public:
  std::function<void()> expect() {
    const std::lock_guard lock(mutex_);
    ++said_;
    return [this, once = std::make_shared<std::atomic<bool>>(false)] {
      promise(!once->exchange(true));  // a frame is read once
      const std::lock_guard inner(mutex_);
      ++read_;
      wake_.notify_all();
    };
  }
  void wait() {
    std::unique_lock lock(mutex_);
    promise(wake_.wait_for(lock, kHang, [this] { return read_ == said_; }));
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  size_t said_ = 0, read_ = 0;
};

class Play {
 public:
  explicit Play(Source source) : source_(source) {
    const auto flags = source_.next<uint8_t>(), more = source_.next<uint8_t>();
    options_.async = flags & 1;
    options_.min_workers = flags & 2 ? 2 : 1;
    options_.max_workers = flags & 4 ? 2 : 8;
    options_.deadline_s = flags & 8 ? 0 : 30;
    options_.rejoin_s = flags & 16 ? 0 : 300;
    options_.return_s = 0;
    options_.staleness = 1;
    options_.save_every = 1;
    options_.threads = 2;
    options_.shard_elements = kShardElements;
    options_.limits = {.max_elements = 1 << 14, .max_tensors = 64};
    if (flags & 32) options_.checkpoint = path();
    options_.log = [](const nlohmann::json& event) {  // as the journal of `gradwire serve`
      promise(!event.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).empty());
    };
    signature_ = toy_signature(more);
    learns_ = more & 8;
    layouts_ = shard_layouts(signature_, kShardElements);
    remove_files();
    restart();
  }
  ~Play() {
    hub_.reset();
    remove_files();
  }

  void run() {
    for (size_t i = 0; i < kMaxActions && source_.size > 0; ++i) act();
    deliveries_->wait();
    look();
    for (size_t i = 0; i < kSessions; ++i) vanish(i);
    if (stopped_) return;
    // Whatever happened: one who is honest is heard.
    hello(0, text_of("honest-worker", signature_));
    deliveries_->wait();
    look();
  }

 private:
  static std::string path() {
    static const std::string name =
        (std::filesystem::temp_directory_path() / ("gradwire_fuzz_hub_" + std::to_string(::getpid()))).string();
    return name;
  }
  static void remove_files() {
    for (const char* end : {"", ".old", ".tmp"}) std::filesystem::remove(path() + end);
  }

  void restart() {
    hub_.reset();
    deliveries_ = std::make_shared<Deliveries>();
    for (auto& session : sessions_) session = std::make_shared<FuzzSession>();
    hub_ = std::make_unique<ServerHub>(options_);
    stopped_ = false;
  }

  void look() {
    const nlohmann::json status = hub_->status();
    promise(status["failed"] == !hub_->failure().empty());
    promise(status.is_object() && !status.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).empty());
  }

  void vanish(size_t index) {
    deliveries_->wait();  // a transport has read everything before it reports the end
    hub_->vanished(sessions_[index].get());
    sessions_[index] = std::make_shared<FuzzSession>();
  }

  void say(size_t index, const Frame& frame, Blob payload) {
    if (sessions_[index]->refused) vanish(index);
    deliveries_->wait();  // one frame at a time, as a stream has it
    Frame passed;
    if (!payload) payload = make_blob({});
    try {
      passed = read_frame_head(write_head(frame, payload->size()), payload->size());
    } catch (const Error&) {
      return;  // the transport would have refused it
    }
    hub_->received(sessions_[index], passed, std::move(payload),
                   [all = deliveries_, done = deliveries_->expect()] { done(); });
  }

  static std::string text_of(const std::string& id, const Signature& signature) {
    return nlohmann::json{{"id", id}, {"name", "n"}, {"signature", signature.json()}}.dump();
  }
  void hello(size_t index, const std::string& text) { say(index, {.kind = FrameKind::hello}, blob_of(text)); }

  float fill() {
    static constexpr std::array<float, 8> kFills = {0.0f,
                                                    1.0f,
                                                    -0.5f,
                                                    1e-30f,
                                                    3e38f,
                                                    std::numeric_limits<float>::quiet_NaN(),
                                                    std::numeric_limits<float>::infinity(),
                                                    -3e38f};
    return kFills[source_.next<uint8_t>() % kFills.size()];
  }

  Blob message(size_t shard, ShardMessage kind) {
    const float value = fill();
    return encode(specs_of(signature_, layouts_[shard % layouts_.size()], kind), value);
  }

  // Some bytes are changed, and then, perhaps, the checksums are made right.
  Blob altered(const Blob& honest) {
    std::vector<std::byte> bytes = *honest;
    const auto how = source_.next<uint8_t>();
    for (int i = 0; i <= how % 4 && !bytes.empty(); ++i)
      bytes[source_.next<uint16_t>() % bytes.size()] ^= std::byte(source_.next<uint8_t>());
    if (how & 16) bytes.resize(source_.next<uint16_t>() % (2 * bytes.size() + 1));
    if (how & 32) reseal(bytes);
    return make_blob(std::move(bytes));
  }

  // Statistics whose words are any number, behind an honest message.
  void lying_update(size_t index) {
    const std::shared_ptr<FuzzSession> session = sessions_[index];
    const uint32_t shard = source_.next<uint8_t>() % layouts_.size();
    ToyUpdate update = encode_update(signature_, layouts_[shard], 0.5f, session->version[shard]);
    std::vector<std::byte> bytes = *update.payload;
    const auto how = source_.next<uint8_t>();
    for (int i = 0; i <= how % 8 && update.tail >= 8; ++i) {
      const size_t word = source_.next<uint16_t>() % (update.tail / 8);
      const uint64_t number = static_cast<uint64_t>(source_.next<int16_t>()) << source_.next<uint8_t>() % 64;
      std::memcpy(bytes.data() + bytes.size() - update.tail + 8 * word, &number, sizeof number);
    }
    if (how & 64) bytes.resize(bytes.size() - std::min<size_t>(bytes.size(), source_.next<uint8_t>()));
    if (how & 128) update.tail = source_.next<uint16_t>();
    say(index,
        {.kind = FrameKind::update,
         .shard = shard,
         .step = session->version[shard],
         .sequence = ++session->sequence,
         .tail = update.tail},
        make_blob(std::move(bytes)));
  }

  std::string altered(std::string text) { return fuzz::altered(source_, std::move(text)); }

  Frame wild(FrameKind kind) {
    Frame frame{.kind = kind};
    frame.flags = source_.next<uint8_t>() % (kind == FrameKind::pull ? 16 : 8);
    frame.shard = source_.next<uint8_t>() % 5;
    const uint64_t few = source_.next<uint8_t>() % 4;
    frame.step = source_.next<uint8_t>() % 8 ? few : source_.next<uint64_t>();
    frame.sequence = source_.next<uint8_t>() % 8 ? few + 1 : source_.next<uint64_t>();
    frame.held = source_.next<uint8_t>() % 2 ? kNone : few;
    frame.tally = {source_.next<float>(), source_.next<float>(), source_.next<float>()};
    return frame;
  }

  void first_weights(size_t index) {
    for (uint32_t p = 0; p < layouts_.size(); ++p)
      if (layouts_[p].role == ShardRole::weights)
        say(index, {.kind = FrameKind::initial, .shard = p},
            encode(specs_of(signature_, layouts_[p], ShardMessage::whole), 1));
  }

  void honest_update(size_t index) {
    const std::shared_ptr<FuzzSession> session = sessions_[index];  // it may be replaced while it speaks
    ++session->sequence;
    for (uint32_t p = 0; p < layouts_.size(); ++p) {
      const ToyUpdate update = encode_update(signature_, layouts_[p], 0.5f, session->version[p]);
      say(index,
          {.kind = FrameKind::update,
           .shard = p,
           .step = session->version[p],
           .sequence = session->sequence,
           .tail = update.tail},
          update.payload);
    }
  }

  void act() {
    static constexpr std::array<const char*, 3> kIds = {"worker-0", "worker-1", "worker-22"};
    const auto code = source_.next<uint8_t>();
    const size_t index = code % kSessions;
    if (sessions_[index]->refused) vanish(index);
    switch (code / kSessions % 20) {
      case 0:
      case 1: {
        const std::string id = kIds[source_.next<uint8_t>() % kIds.size()];
        return hello(index, text_of(id, signature_));
      }
      case 2:
        return hello(index, altered(text_of(kIds[index % kIds.size()], signature_)));
      case 3:
        return hello(index, source_.text(source_.next<uint8_t>()));
      case 4: {  // another model
        const auto more = source_.next<uint8_t>();
        Signature other = toy_signature(more);
        if (more & 8) other.parameters.push_back({"u", {source_.next<uint8_t>(), source_.next<uint16_t>()}});
        if (more & 16) other.parameters.erase(other.parameters.begin());
        return hello(index, text_of(kIds[index % kIds.size()], other));
      }
      case 5:
      case 6:
        return first_weights(index);
      case 7:
      case 8:
        return honest_update(index);
      case 9:
        return say(index, wild(FrameKind::initial), message(source_.next<uint8_t>(), ShardMessage::whole));
      case 10: {
        if (learns_) return lying_update(index);
        const Frame frame = wild(FrameKind::update);
        return say(index, frame, message(frame.shard, ShardMessage::up));
      }
      case 11: {
        const Frame frame = wild(source_.next<uint8_t>() % 2 ? FrameKind::update : FrameKind::residual);
        return say(index, frame, altered(message(frame.shard, ShardMessage::up)));
      }
      case 12:
        return say(index, wild(FrameKind::pull), nullptr);
      case 13: {
        const Frame frame = wild(FrameKind::residual);
        return say(index, frame, message(frame.shard, ShardMessage::whole));
      }
      case 14: {
        const Blob buffers = encode(buffer_specs(signature_), fill());
        return say(index, {.kind = FrameKind::buffers}, source_.next<uint8_t>() % 2 ? buffers : altered(buffers));
      }
      case 15:
        return say(index, {.kind = FrameKind::report},
                   blob_of(source_.next<uint8_t>() % 2 ? altered(R"({"loss":1.5,"step":3})")
                                                       : source_.text(source_.next<uint8_t>())));
      case 16:
        return say(index, {.kind = FrameKind::goodbye}, nullptr);
      case 17:
        return vanish(index);
      case 18: {  // any frame, or a text of any depth
        const auto kind = static_cast<FrameKind>(source_.next<uint8_t>() % 70);
        return say(index, wild(kind), blob_of(nested_json(source_)));
      }
      default:
        return rare(source_.next<uint8_t>());
    }
  }

  // What takes longer, at most once each.
  void rare(uint8_t which) {
    switch (which % 4) {
      case 0:
        return look();
      case 1:  // the clock of the server looks at deadlines every 50 ms
        if (!std::exchange(ticked_, true)) std::this_thread::sleep_for(std::chrono::milliseconds(60));
        return;
      case 2:
        if (stopped_ || options_.checkpoint.empty()) return;
        deliveries_->wait();
        hub_->stop();
        stopped_ = true;
        return;
      default:
        if (!std::exchange(restarted_, true)) restart();
        return;
    }
  }

  Source source_;
  HubOptions options_;
  Signature signature_;
  std::vector<ShardLayout> layouts_;
  std::shared_ptr<Deliveries> deliveries_;
  std::array<std::shared_ptr<FuzzSession>, kSessions> sessions_;
  std::unique_ptr<ServerHub> hub_;
  bool learns_ = false, stopped_ = false, ticked_ = false, restarted_ = false;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Play(Source{data, size}).run();
  return 0;
}
