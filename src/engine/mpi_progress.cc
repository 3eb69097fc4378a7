// SPDX-License-Identifier: Apache-2.0
// The progress of an MPI engine (the protocol is told in mpi_core.h), on a thread of its own or inside its callers'
// calls. It turns in a loop: take orders, test payload, hear what peers say, settle what has ended, look at the clock,
// rest. The thread rests on a condition variable, so that a new order is taken at once: for a moment not at all, then
// for tens of microseconds while something is in the air, and for milliseconds while nothing is, which is how soon
// poison is noticed by a rank that waits for nothing.
#include <algorithm>
#include <cstring>
#include <exception>

#include "core/check.h"
#include "engine/mpi_core.h"

namespace gradwire::engine_detail {

namespace {

using namespace std::chrono_literals;

constexpr int kTag = 1;               // control: one tag, so that messages between two ranks stay in order
constexpr int kTags = 1 << 15;        // payload: by sequence number; every MPI has at least so many
constexpr size_t kInboxBytes = 2048;  // the longest control message; longer words are cut
constexpr int kEagerTurns = 200;      // turns without news before the thread begins to sleep
constexpr auto kBusyRest = 50us;
constexpr auto kIdleRest = 5ms;
constexpr auto kSilence = 5s;   // how long a rank that is told of poison may be silent before it is given up
constexpr auto kFarewell = 5s;  // how long a destructor waits for the others to answer

}  // namespace

// Sent as it lies in memory: all ranks of an MPI job run on machines of the same byte order.
struct MpiCore::ControlMessage {
  ControlType type;
  Code code = Code::barrier;
  int32_t root = -1;
  int32_t rank = -1;                   // stop: the failure's
  uint64_t number = 0;                 // see mpi_core.h
  uint64_t sends = 0;                  // offer
  uint64_t expects = 0;                // offer
  ErrorKind kind = ErrorKind::engine;  // stop
  uint32_t field_bytes = 0;            // stop: the text begins with the failure's field
};

void MpiCore::run() noexcept {
  for (;;) {
    const bool progressed = advance();
    if (ended_) return;
    rest(progressed);
  }
}

bool MpiCore::advance() noexcept {
  if (ended_) return false;
  try {
    const bool progressed = turn();
    ended_ = closed();
    return progressed;
  } catch (const std::exception& e) {
    give_up(e.what());
    ended_ = true;
    return true;
  }
}

// MPI itself failed, or is gone. Nobody knows what it still holds: everything fails, nothing is freed.
void MpiCore::give_up(const std::string& why) noexcept {
  leaky_ = true;
  condemn({ErrorKind::engine, why, kMpi, -1});
  int finalised = 0;
  MPI_Finalized(&finalised);
  try {
    if (!finalised && !stopped_) stop();
  } catch (const std::exception&) {
    // The peers will find out by their time-outs.
  }
  std::unique_lock lock(mutex_);
  for (const auto& order : orders_) order->over = true;
  for (const auto& [sequence, operation] : operations_) operation->over = true;
  done_.notify_all();
}

// Payload is tested before control is heard, and operations are settled after both: bytes that a peer let go of after
// it had sent `stop` are never taken for good.
bool MpiCore::turn() {
  int finalised = 0;
  MPI_Finalized(&finalised);
  if (finalised) throw Error(ErrorKind::usage, "MPI was finalised before the engine was destroyed", kMpi);
  bool progressed = take_orders();
  progressed |= poll_payload();
  progressed |= poll_control();
  if (stopped_) drain();
  progressed |= settle();
  check_deadlines();
  return progressed;
}

bool MpiCore::take_orders() {
  bool any = false, closing = false;
  for (;;) {
    std::shared_ptr<MpiOperation> order;
    bool condemned = false;
    {
      // One at a time: if MPI fails in between, no operation is forgotten.
      std::unique_lock lock(mutex_);
      condemned = failure_.has_value();
      closing = closing_;
      if (!orders_.empty()) {
        order = std::move(orders_.front());
        orders_.pop_front();
      }
    }
    if (order) operations_[order->sequence] = order;
    if (condemned && !stopped_) stop();
    if (!order) break;
    admit(order);
    any = true;
  }
  if (closing && !leaving_) {
    leaving_ = SteadyClock::now();
    for (int p = 0; p < world_; ++p) {
      if (!peers_[p].told_last) tell(p, {.type = ControlType::bye, .number = admitted_});
      peers_[p].told_last = true;
    }
  }
  return any;
}

void MpiCore::admit(const std::shared_ptr<MpiOperation>& operation) {
  ++admitted_;
  if (stopped_) return;
  for (int p = 0; p < world_; ++p) {
    const Peer& peer = peers_[p];
    if (peer.left_after && *peer.left_after <= operation->sequence) {
      condemn(left(p, operation->describe()));
    } else if (p != rank_) {
      const Offer offer = offer_to(operation->call, p);
      tell(p, {.type = ControlType::offer,
               .code = offer.code,
               .root = offer.root,
               .number = operation->sequence,
               .sends = offer.sends,
               .expects = offer.expects});
    }
  }
  for (int i = 1; i < world_; ++i) match((rank_ + i) % world_);
  copy_bytes(operation->call.send[rank_], operation->call.recv[rank_]);
}

// Agrees on whatever both this rank and the peer have started.
void MpiCore::match(int p) {
  Peer& peer = peers_[p];
  while (!stopped_ && !peer.offers.empty()) {
    const auto found = operations_.find(peer.agreed);
    if (found == operations_.end()) return;
    const Offer theirs = peer.offers.front();
    if (const auto failure = compare(peer.agreed, p, theirs, rank_, offer_to(found->second->call, p))) {
      condemn(*failure);
      return;
    }
    peer.offers.pop_front();
    ++peer.agreed;
    ++found->second->agreed;
    post(found->second, p);
  }
}

void MpiCore::post(const std::shared_ptr<MpiOperation>& operation, int p) {
  const int tag = static_cast<int>(operation->sequence % kTags);
  const auto add = [&](MPI_Request request, bool receive) {
    requests_.push_back(request);
    transfers_.push_back({operation, p, receive});
    ++operation->open[p];
  };
  const Bytes recv = operation->call.recv[p];
  for (size_t at = 0; at < recv.size(); at += piece_bytes_) {
    const Bytes piece = recv.subspan(at, std::min(piece_bytes_, recv.size() - at));
    MPI_Request request;
    check_mpi(MPI_Irecv(piece.data(), static_cast<int>(piece.size()), MPI_BYTE, p, tag, payload_, &request),
              "MPI_Irecv");
    add(request, true);
  }
  const ConstBytes send = operation->call.send[p];
  for (size_t at = 0; at < send.size(); at += piece_bytes_) {
    const ConstBytes piece = send.subspan(at, std::min(piece_bytes_, send.size() - at));
    MPI_Request request;
    check_mpi(MPI_Isend(piece.data(), static_cast<int>(piece.size()), MPI_BYTE, p, tag, payload_, &request),
              "MPI_Isend");
    add(request, false);
  }
}

bool MpiCore::poll_payload() {
  if (requests_.empty()) return false;
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int ended = 0;
  const int code =
      MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &ended, indices_.data(), statuses_.data());
  if (code == MPI_ERR_IN_STATUS) {
    for (int i = 0; i < ended; ++i) check_mpi(statuses_[i].MPI_ERROR, "payload transfer");
  }
  check_mpi(code, "MPI_Testsome");
  if (ended == MPI_UNDEFINED || ended == 0) return false;
  const SteadyClock::time_point now = SteadyClock::now();
  for (int i = 0; i < ended; ++i) {
    const Transfer& transfer = transfers_[indices_[i]];
    --transfer.operation->open[transfer.peer];
    transfer.operation->moved = now;
  }
  size_t kept = 0;
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    requests_[kept] = requests_[i];
    if (kept != i) transfers_[kept] = std::move(transfers_[i]);
    ++kept;
  }
  requests_.resize(kept);
  transfers_.resize(kept);
  return true;
}

void MpiCore::listen(int p) {
  Peer& peer = peers_[p];
  peer.inbox.resize(kInboxBytes);
  check_mpi(MPI_Irecv(peer.inbox.data(), kInboxBytes, MPI_BYTE, p, kTag, control_, &listening_[p]), "MPI_Irecv");
}

bool MpiCore::poll_control() {
  bool heard = false;
  indices_.resize(world_);
  statuses_.resize(world_);
  // Again until silence: peers may have said more than one thing.
  for (;;) {
    int ended = 0;
    const int code = MPI_Testsome(world_, listening_.data(), &ended, indices_.data(), statuses_.data());
    if (code == MPI_ERR_IN_STATUS) {
      for (int i = 0; i < ended; ++i) check_mpi(statuses_[i].MPI_ERROR, "control message");
    }
    check_mpi(code, "MPI_Testsome");
    if (ended == MPI_UNDEFINED || ended == 0) break;
    heard = true;
    for (int i = 0; i < ended; ++i) {
      const int p = indices_[i];
      int bytes = 0;
      check_mpi(MPI_Get_count(&statuses_[i], MPI_BYTE, &bytes), "MPI_Get_count");
      on_control(p, {peers_[p].inbox.data(), static_cast<size_t>(bytes)});
      if (!peers_[p].heard_last) listen(p);
    }
  }
  for (size_t i = 0; i < telling_.size();) {
    int ended = 0;
    check_mpi(MPI_Test(&telling_[i], &ended, MPI_STATUS_IGNORE), "MPI_Test");
    if (!ended) {
      ++i;
      continue;
    }
    telling_[i] = telling_.back();
    telling_.pop_back();
    std::swap(told_[i], told_.back());
    told_.pop_back();
  }
  return heard;
}

void MpiCore::on_control(int p, std::span<const std::byte> message) {
  ControlMessage head{};
  GW_CHECK(message.size() >= sizeof head);
  std::memcpy(&head, message.data(), sizeof head);
  const std::string_view text(reinterpret_cast<const char*>(message.data()) + sizeof head,
                              message.size() - sizeof head);
  Peer& peer = peers_[p];
  switch (head.type) {
    case ControlType::offer:
      GW_CHECK(head.number == peer.agreed + peer.offers.size());
      peer.offers.push_back({head.code, head.root, head.sends, head.expects});
      match(p);
      break;
    case ControlType::stop: {
      GW_CHECK(head.field_bytes <= text.size());
      peer.stopped_at = head.number;
      condemn({head.kind, std::string(text.substr(head.field_bytes)), std::string(text.substr(0, head.field_bytes)),
               head.rank});
      break;
    }
    case ControlType::bye:
      peer.left_after = head.number;
      peer.heard_last = true;
      if (!peer.told_last) tell(p, {.type = ControlType::ack});
      peer.told_last = true;
      for (const auto& [sequence, operation] : operations_) {
        if (sequence >= head.number) condemn(left(p, operation->describe()));
      }
      break;
    case ControlType::ack:
      peer.heard_last = true;
      break;
  }
}

void MpiCore::tell(int p, const ControlMessage& head, std::string_view text) {
  if (peers_[p].told_last) return;
  text = text.substr(0, kInboxBytes - sizeof head);
  std::vector<std::byte> message(sizeof head + text.size());
  std::memcpy(message.data(), &head, sizeof head);
  if (!text.empty()) std::memcpy(message.data() + sizeof head, text.data(), text.size());
  MPI_Request request;
  check_mpi(MPI_Isend(message.data(), static_cast<int>(message.size()), MPI_BYTE, p, kTag, control_, &request),
            "MPI_Isend");
  telling_.push_back(request);
  told_.push_back(std::move(message));  // moving a vector leaves its bytes where they are
}

void MpiCore::stop() {
  stopped_ = SteadyClock::now();
  leaky_ = true;
  EngineFailure failure;
  {
    std::unique_lock lock(mutex_);
    failure = *failure_;
  }
  for (int p = 0; p < world_; ++p) {
    tell(p,
         {.type = ControlType::stop,
          .rank = failure.rank,
          .number = peers_[p].agreed,
          .kind = failure.kind,
          .field_bytes = static_cast<uint32_t>(failure.field.size())},
         failure.field + failure.text);
  }
}

// After stop: whatever the peer will never post is taken out of the air; for the rest there is patience, less of it
// with a peer whose progress thread does not even answer.
void MpiCore::drain() {
  if (requests_.empty()) return;
  const auto patience = timeout();
  const SteadyClock::time_point now = SteadyClock::now();
  size_t kept = 0;
  for (size_t i = 0; i < requests_.size(); ++i) {
    const Transfer& transfer = transfers_[i];
    const Peer& peer = peers_[transfer.peer];
    // A rank that has left without a stop had posted, and ended, all that it agreed on.
    const bool answered = peer.stopped_at || peer.heard_last;
    const bool never = peer.stopped_at && *peer.stopped_at <= transfer.operation->sequence;
    const bool too_late =
        now >= *stopped_ + (answered ? patience : std::min<std::chrono::milliseconds>(patience, kSilence));
    int ended = 0;
    if (never || too_late) {
      if (transfer.receive) MPI_Cancel(&requests_[i]);
      MPI_Test(&requests_[i], &ended, MPI_STATUS_IGNORE);
    }
    const bool unread = never && !transfer.receive;
    if (!ended && !unread && !too_late) {
      requests_[kept] = requests_[i];
      if (kept != i) transfers_[kept] = std::move(transfers_[i]);
      ++kept;
      continue;
    }
    if (!ended) MPI_Request_free(&requests_[i]);
    --transfer.operation->open[transfer.peer];
    if (!ended && !unread) {
      std::unique_lock lock(mutex_);
      transfer.operation->held = true;
    }
  }
  requests_.resize(kept);
  transfers_.resize(kept);
}

bool MpiCore::settle() {
  bool any = false;
  for (auto it = operations_.begin(); it != operations_.end();) {
    MpiOperation& operation = *it->second;
    const bool quiet = std::all_of(operation.open.begin(), operation.open.end(), [](int open) { return open == 0; });
    const bool complete = quiet && operation.agreed == world_ - 1 && !stopped_;
    if (!complete && !(quiet && stopped_)) {
      ++it;
      continue;
    }
    std::unique_lock lock(mutex_);
    // Poison that is known by now counts, though this thread has not acted on it yet.
    if (complete && failure_ && operation.call.code != Code::split) {
      ++it;
      continue;
    }
    operation.complete = complete;
    operation.over = true;
    done_.notify_all();
    it = operations_.erase(it);
    any = true;
  }
  return any;
}

// The time-out runs from the wait, and begins anew whenever a piece of the operation has moved.
void MpiCore::check_deadlines() {
  if (stopped_ || operations_.empty()) return;
  std::optional<EngineFailure> failure;
  {
    std::unique_lock lock(mutex_);
    if (failure_) return;
    const SteadyClock::time_point now = SteadyClock::now();
    for (const auto& [sequence, operation] : operations_) {
      if (!operation->waited_since || now < std::max(*operation->waited_since, operation->moved) + timeout_) continue;
      // Who has not come; of several, the one furthest behind: the others may be waiting for it themselves.
      int worst = -1;
      const auto heard_of = [&](int p) { return peers_[p].agreed + peers_[p].offers.size(); };
      for (int p = 0; p < world_; ++p) {
        if (p == rank_ || heard_of(p) > sequence) continue;
        if (worst < 0 || heard_of(p) < heard_of(worst)) worst = p;
      }
      if (worst >= 0) {
        failure = timed_out(worst, "start", operation->describe(), timeout_);
        break;
      }
      worst = static_cast<int>(
          std::find_if(operation->open.begin(), operation->open.end(), [](int open) { return open > 0; }) -
          operation->open.begin());
      failure = timed_out(worst, "move its bytes of", operation->describe(), timeout_);
      break;
    }
  }
  if (failure) condemn(*failure);
}

bool MpiCore::closed() {
  if (!leaving_) return false;
  const bool heard = std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.heard_last; });
  if (heard && telling_.empty()) return true;
  if (SteadyClock::now() < *leaving_ + kFarewell) return false;
  leaky_ = true;
  return true;
}

void MpiCore::rest(bool progressed) {
  idle_turns_ = progressed ? 0 : idle_turns_ + 1;
  const bool busy = !operations_.empty() || !telling_.empty() || leaving_;
  if (busy && idle_turns_ < kEagerTurns) {
    std::this_thread::yield();
    return;
  }
  std::unique_lock lock(mutex_);
  const auto ordered = [&] { return !orders_.empty() || (closing_ && !leaving_) || (failure_ && !stopped_); };
  if (busy) {
    work_.wait_for(lock, kBusyRest, ordered);
  } else {
    work_.wait_for(lock, kIdleRest, ordered);
  }
}

}  // namespace gradwire::engine_detail
