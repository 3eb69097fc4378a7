// SPDX-License-Identifier: Apache-2.0
// The loopback engine: ranks are threads of one process that meet in a Hub.
//
// Starting an operation posts the rank's spans under its own count of operations, the sequence number; the ranks that
// posted the same number have met. A pair is what one rank sends another in one operation. As soon as both have posted,
// the pair is ready, and the first of the two ranks that waits copies it, straight from the sender's memory into the
// receiver's. So an operation that all ranks have started ends for the ranks that wait, whatever the others do
// meanwhile and in whatever order they wait. An operation is over for a rank when every rank has started it and all the
// rank's pairs are copied.
//
// The hub's mutex guards the bookkeeping only; copies run outside it, in parallel. A pair that is being copied pins
// both ranks' postings. Pairs are claimed under the mutex and never after poison, so a wait that fails needs only to
// stay until its own pins are gone: after that no thread touches its buffers.
#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "core/clock.h"
#include "engine/call.h"
#include "gradwire/engine.h"

namespace gradwire {

namespace {

using namespace engine_detail;

class Hub;

enum class Pair : uint8_t { none, ready, copying, done };

struct Posting {
  bool posted = false;
  Call call;
  int open = 0;  // pairs of this rank that are not copied yet
  int pins = 0;  // pairs of this rank that are being copied now
};

struct LoopbackOperation {
  LoopbackOperation(uint64_t number, int world)
      : sequence(number), postings(world), pairs(static_cast<size_t>(world) * world) {}
  int world() const { return static_cast<int>(postings.size()); }
  Pair& pair(int from, int to) { return pairs[static_cast<size_t>(from) * postings.size() + to]; }

  const uint64_t sequence;
  int posted = 0;
  std::vector<Posting> postings;
  std::vector<Pair> pairs;
  std::map<int, std::shared_ptr<Hub>> groups;  // split: by colour
};

class Hub {
 public:
  // group[i]: the rank in the hub this one was split from; empty for the first one.
  Hub(int world, std::vector<int> group) : members_(world), group_(std::move(group)) {}

  int world() const { return static_cast<int>(members_.size()); }

  std::shared_ptr<LoopbackOperation> start(int rank, Call call);
  void wait(LoopbackOperation& operation, int rank);
  std::shared_ptr<Hub> child(LoopbackOperation& split, int rank, int* rank_there);
  void leave(int rank);
  void poison(const EngineFailure& failure) {
    std::unique_lock lock(mutex_);
    condemn(lock, failure);
  }
  void set_timeout(int rank, std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    members_[rank].timeout = timeout;
  }
  std::chrono::milliseconds timeout(int rank) {
    std::unique_lock lock(mutex_);
    return members_[rank].timeout;
  }

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct Member {
    std::condition_variable wake;
    uint64_t started = 0;
    bool left = false;
    std::chrono::milliseconds timeout = kDefaultTimeout;
  };

  void condemn(Lock& lock, const EngineFailure& failure);
  void meet(Lock& lock, LoopbackOperation& operation, int a, int b);
  bool copy_one(Lock& lock, LoopbackOperation& operation, int rank);
  void copy(Lock& lock, LoopbackOperation& operation, int from, int to);
  int missing(const LoopbackOperation& operation) const;
  static std::string describe(const LoopbackOperation& operation, int rank) {
    const Call& call = operation.postings[rank].call;
    return engine_detail::describe(call.code, call.root, operation.sequence);
  }

  std::mutex mutex_;
  std::optional<EngineFailure> failure_;
  std::vector<Member> members_;
  std::map<uint64_t, std::shared_ptr<LoopbackOperation>> incomplete_;  // not yet started by all ranks
  std::vector<std::weak_ptr<Hub>> children_;
  const std::vector<int> group_;
};

// Locks are nested from parent to child only.
void Hub::condemn(Lock&, const EngineFailure& failure) {
  if (failure_) return;
  failure_ = failure;
  for (Member& member : members_) member.wake.notify_all();
  for (const std::weak_ptr<Hub>& weak : children_) {
    if (const auto hub = weak.lock()) hub->poison(inherited(failure, hub->group_));
  }
}

std::shared_ptr<LoopbackOperation> Hub::start(int rank, Call call) {
  Lock lock(mutex_);
  if (failure_) failure_->raise();
  const uint64_t sequence = members_[rank].started++;
  auto& place = incomplete_[sequence];
  if (!place) place = std::make_shared<LoopbackOperation>(sequence, world());
  const std::shared_ptr<LoopbackOperation> operation = place;
  Posting& mine = operation->postings[rank];
  mine.call = std::move(call);
  mine.posted = true;
  if (++operation->posted == world()) incomplete_.erase(sequence);

  for (int p = 0; p < world(); ++p) {
    if (members_[p].left && !operation->postings[p].posted) condemn(lock, left(p, describe(*operation, rank)));
    if (operation->postings[p].posted) meet(lock, *operation, rank, p);
  }
  if (failure_) failure_->raise();
  for (int p = 0; p < world(); ++p) {
    if (p != rank) members_[p].wake.notify_all();
  }
  return operation;
}

void Hub::meet(Lock& lock, LoopbackOperation& operation, int a, int b) {
  const Call& call_a = operation.postings[a].call;
  const Call& call_b = operation.postings[b].call;
  if (const auto failure = compare(operation.sequence, a, offer_to(call_a, b), b, offer_to(call_b, a))) {
    condemn(lock, *failure);
    return;
  }
  const auto make_ready = [&](int from, int to) {
    if (operation.postings[from].call.send[to].empty()) return;
    operation.pair(from, to) = Pair::ready;
    ++operation.postings[from].open;
    ++operation.postings[to].open;
  };
  make_ready(a, b);
  if (a != b) make_ready(b, a);
}

void Hub::wait(LoopbackOperation& operation, int rank) {
  Lock lock(mutex_);
  Member& member = members_[rank];
  Posting& mine = operation.postings[rank];
  const SteadyClock::time_point deadline = SteadyClock::now() + member.timeout;
  for (;;) {
    if (failure_) {
      member.wake.wait(lock, [&] { return mine.pins == 0; });
      failure_->raise();
    }
    if (copy_one(lock, operation, rank)) continue;
    const bool all_started = operation.posted == world();
    if (all_started && mine.open == 0) return;
    if (all_started) {
      // The peer is copying what is left; that ends without help.
      member.wake.wait(lock);
    } else if (member.wake.wait_until(lock, deadline) == std::cv_status::timeout && operation.posted < world()) {
      condemn(lock, timed_out(missing(operation), "start", describe(operation, rank), member.timeout));
    }
  }
}

// A rank first copies what it receives, each rank beginning with another peer, and then what it sends. If all ranks
// wait, all of them copy, and no two of them read the same memory at once.
bool Hub::copy_one(Lock& lock, LoopbackOperation& operation, int rank) {
  const int w = world();
  for (int i = 0; i < w; ++i) {
    const int p = (rank + i) % w;
    if (operation.pair(p, rank) == Pair::ready) return copy(lock, operation, p, rank), true;
  }
  for (int i = 1; i < w; ++i) {
    const int p = (rank + i) % w;
    if (operation.pair(rank, p) == Pair::ready) return copy(lock, operation, rank, p), true;
  }
  return false;
}

void Hub::copy(Lock& lock, LoopbackOperation& operation, int from, int to) {
  Posting& sender = operation.postings[from];
  Posting& receiver = operation.postings[to];
  operation.pair(from, to) = Pair::copying;
  ++sender.pins;
  ++receiver.pins;
  const ConstBytes source = sender.call.send[to];
  const Bytes target = receiver.call.recv[from];
  lock.unlock();
  copy_bytes(source, target);
  lock.lock();
  operation.pair(from, to) = Pair::done;
  for (Posting* posting : {&sender, &receiver}) {
    --posting->pins;
    --posting->open;
  }
  members_[from].wake.notify_all();
  members_[to].wake.notify_all();
}

// Of the ranks that have not started it, the one that is furthest behind: the others may be waiting for it themselves.
int Hub::missing(const LoopbackOperation& operation) const {
  int worst = -1;
  for (int p = 0; p < world(); ++p) {
    if (operation.postings[p].posted) continue;
    if (worst < 0 || members_[p].started < members_[worst].started) worst = p;
  }
  return worst;
}

// This comes after all ranks have started the split, so that the colours are known.
std::shared_ptr<Hub> Hub::child(LoopbackOperation& split, int rank, int* rank_there) {
  Lock lock(mutex_);
  if (failure_) failure_->raise();
  std::vector<int> colours;
  for (const Posting& posting : split.postings) colours.push_back(posting.call.colour);
  std::vector<int> group = group_of(colours, rank);
  *rank_there = static_cast<int>(std::find(group.begin(), group.end(), rank) - group.begin());
  std::shared_ptr<Hub>& hub = split.groups[colours[rank]];
  if (!hub) {
    const int ranks = static_cast<int>(group.size());
    hub = std::make_shared<Hub>(ranks, std::move(group));
    std::erase_if(children_, [](const std::weak_ptr<Hub>& weak) { return weak.expired(); });
    children_.push_back(hub);
  }
  hub->set_timeout(*rank_there, members_[rank].timeout);
  return hub;
}

void Hub::leave(int rank) {
  Lock lock(mutex_);
  members_[rank].left = true;
  for (const auto& [sequence, operation] : incomplete_) {
    if (operation->postings[rank].posted) continue;
    const auto& postings = operation->postings;
    const auto other = std::find_if(postings.begin(), postings.end(), [](const Posting& p) { return p.posted; });
    condemn(lock, left(rank, describe(*operation, static_cast<int>(other - postings.begin()))));
    return;
  }
}

struct LoopbackHandle : Handle::State {
  LoopbackHandle(std::shared_ptr<Hub> h, std::shared_ptr<LoopbackOperation> o, int r)
      : hub(std::move(h)), operation(std::move(o)), rank(r) {}
  void wait() override { hub->wait(*operation, rank); }

  const std::shared_ptr<Hub> hub;
  const std::shared_ptr<LoopbackOperation> operation;
  const int rank;
};

class LoopbackEngine : public Engine {
 public:
  LoopbackEngine(std::shared_ptr<Hub> hub, int rank, std::shared_ptr<Traffic> parent)
      : hub_(std::move(hub)), rank_(rank), traffic_(std::make_shared<Traffic>(std::move(parent))) {}
  ~LoopbackEngine() override { hub_->leave(rank_); }

  std::string name() const override { return "loopback"; }
  int rank() const override { return rank_; }
  int size() const override { return hub_->world(); }
  int node() const override { return 0; }  // ranks are threads of one process

  Handle all_to_all(std::span<const ConstBytes> send, std::span<const Bytes> recv) override {
    return start(all_to_all_call(size(), send, recv));
  }
  Handle all_gather(ConstBytes mine, std::span<const Bytes> recv) override {
    return start(all_gather_call(size(), mine, recv));
  }
  Handle broadcast(Bytes data, int root) override { return start(broadcast_call(size(), rank_, data, root)); }
  Handle barrier() override { return start(barrier_call(size())); }

  std::unique_ptr<Engine> split(int colour) override {
    Call call = barrier_call(size());
    call.code = Code::split;
    call.colour = colour;
    const auto operation = hub_->start(rank_, std::move(call));
    hub_->wait(*operation, rank_);
    int rank_there = 0;
    auto hub = hub_->child(*operation, rank_, &rank_there);
    return std::make_unique<LoopbackEngine>(std::move(hub), rank_there, traffic_);
  }

  uint64_t bytes_sent() const override { return traffic_->bytes(); }
  void set_timeout(std::chrono::milliseconds timeout) override { hub_->set_timeout(rank_, checked_timeout(timeout)); }
  void poison(const std::string& why) override { hub_->poison(poisoned(rank_, why)); }

 private:
  Handle start(Call call) {
    const uint64_t bytes = payload_bytes(call, rank_);
    auto operation = hub_->start(rank_, std::move(call));
    traffic_->add(bytes);
    return Handle(std::make_unique<LoopbackHandle>(hub_, std::move(operation), rank_));
  }

  const std::shared_ptr<Hub> hub_;
  const int rank_;
  const std::shared_ptr<Traffic> traffic_;
};

}  // namespace

std::vector<std::unique_ptr<Engine>> make_loopback(int world) {
  if (world < 1) {
    throw Error(ErrorKind::usage, "world is " + std::to_string(world) + "; an engine needs at least 1 rank", "world");
  }
  const auto hub = std::make_shared<Hub>(world, std::vector<int>{});
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < world; ++r) engines.push_back(std::make_unique<LoopbackEngine>(hub, r, nullptr));
  return engines;
}

}  // namespace gradwire
