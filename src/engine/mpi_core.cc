// SPDX-License-Identifier: Apache-2.0
// The callers' side of an MPI engine's core: how it is made and ends, and how threads hand it operations, wait for them
// and poison it. How these make progress is in mpi_progress.cc, the protocol in mpi_core.h.
#include "engine/mpi_core.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>

#include "core/check.h"

namespace gradwire::engine_detail {

namespace {

std::atomic<size_t> piece_bytes{size_t{1} << 30};

// The engines of this thread that have no thread of their own.
thread_local std::vector<std::weak_ptr<MpiCore>> callers_engines;

// How many turns a wait adds so that what this rank has told its peers leaves it before the caller computes again.
constexpr int kLastTurns = 200;

}  // namespace

size_t set_chunk_bytes(size_t bytes) {
  GW_CHECK(bytes >= 1 && bytes <= size_t{1} << 30);
  return piece_bytes.exchange(bytes);
}

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char words[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, words, &length);
  throw Error(ErrorKind::engine, fmt::format("{} failed: {}", call, words), kMpi);
}

std::shared_ptr<MpiCore> MpiCore::make(MPI_Comm payload, MPI_Comm control, std::vector<int> group,
                                       std::chrono::milliseconds timeout, Progress progress) {
  auto core = std::make_shared<MpiCore>(payload, control, std::move(group), timeout, progress);
  if (progress == Progress::callers_thread) callers_engines.push_back(core);
  return core;
}

MpiCore::MpiCore(MPI_Comm payload, MPI_Comm control, std::vector<int> group, std::chrono::milliseconds timeout,
                 Progress progress)
    : payload_(payload),
      control_(control),
      group_(std::move(group)),
      piece_bytes_(piece_bytes.load()),
      progress_(progress),
      timeout_(timeout) {
  // A failing call must come back to us, and not end the job.
  check_mpi(MPI_Comm_set_errhandler(payload_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_set_errhandler(control_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_rank(payload_, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(payload_, &world_), "MPI_Comm_size");
  peers_.resize(world_);
  listening_.resize(world_, MPI_REQUEST_NULL);
  peers_[rank_].heard_last = peers_[rank_].told_last = true;
  for (int p = 0; p < world_; ++p) {
    if (p != rank_) listen(p);
  }
  if (progress_ == Progress::own_thread) thread_ = std::thread([this] { run(); });
}

bool MpiCore::advance_callers_engines() noexcept {
  bool progressed = false;
  std::erase_if(callers_engines, [](const auto& weak) { return weak.expired(); });
  for (size_t i = 0; i < callers_engines.size(); ++i) {
    if (const auto core = callers_engines[i].lock()) progressed |= core->advance();
  }
  return progressed;
}

// MPI was promised that only this thread calls it.
void MpiCore::expect_own_thread() const {
  if (std::this_thread::get_id() == made_on_) return;
  throw Error(
      ErrorKind::usage,
      "this engine is used on another thread than the one that made it; without MPI_THREAD_MULTIPLE it stays on "
      "its thread",
      "engine");
}

// All handles are gone by now (they hold the core): nothing is in the air but what poison has left there. The others'
// progress threads answer the farewell, so they need not destroy their engines at the same time. A poisoned engine
// does not free its communicators: a peer may have given up a send to this rank, and MPI reuses the names of freed
// communicators. That is leaked, and so are the inboxes if a peer did not answer.
MpiCore::~MpiCore() {
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
  }
  work_.notify_all();
  if (progress_ == Progress::own_thread) {
    thread_.join();
  } else if (std::this_thread::get_id() == made_on_) {
    for (;;) {
      const bool progressed = advance();
      if (ended_) break;
      rest(advance_callers_engines() || progressed);
    }
  } else {
    leaky_ = true;  // MPI may not be called here, so the peers find out by their time-outs
    leak_inboxes();
    return;
  }
  int finalised = 0;
  MPI_Finalized(&finalised);
  if (finalised || leaky_) {
    leak_inboxes();
    return;
  }
  MPI_Comm payload = payload_, control = control_;
  MPI_Comm_free(&payload);
  MPI_Comm_free(&control);
}

void MpiCore::leak_inboxes() {
  const auto heard = [](const Peer& peer) { return peer.heard_last; };
  if (std::all_of(peers_.begin(), peers_.end(), heard) && telling_.empty()) return;
  struct Leaked {
    std::vector<Peer> peers;
    std::vector<std::vector<std::byte>> told;
  };
  new Leaked{std::move(peers_), std::move(told_)};
}

std::shared_ptr<MpiOperation> MpiCore::start(Call call) {
  const bool inside = progress_ == Progress::callers_thread;
  if (inside) {
    expect_own_thread();
    advance_callers_engines();
  }
  std::unique_lock lock(mutex_);
  if (failure_) failure_->raise();
  const auto operation = std::make_shared<MpiOperation>(started_++, std::move(call));
  const Offer own = offer_to(operation->call, rank_);
  if (const auto failure = compare(operation->sequence, rank_, own, rank_, own)) {
    lock.unlock();
    condemn_and_tell(*failure);
    failure->raise();
  }
  orders_.push_back(operation);
  work_.notify_one();
  lock.unlock();
  if (inside) advance_callers_engines();  // the peers may already agree on it
  return operation;
}

bool MpiCore::wait_complete(MpiOperation& operation) {
  if (progress_ == Progress::callers_thread) expect_own_thread();
  std::unique_lock lock(mutex_);
  operation.waited_since = SteadyClock::now();
  if (progress_ == Progress::callers_thread) {
    lock.unlock();
    while (!operation.over) rest(advance_callers_engines());
    for (int turns = 0; !telling_.empty() && turns < kLastTurns; ++turns) advance_callers_engines();
    return operation.complete;
  }
  done_.wait(lock, [&] { return operation.over; });
  return operation.complete;
}

void MpiCore::wait(MpiOperation& operation) {
  wait_complete(operation);
  std::unique_lock lock(mutex_);
  if (!failure_) return;
  EngineFailure failure = *failure_;
  if (operation.held)
    failure.text += "; MPI still holds the buffers of this operation: keep them until the process ends";
  failure.raise();
}

void MpiCore::condemn(const EngineFailure& failure) {
  std::vector<std::weak_ptr<MpiCore>> children;
  {
    std::unique_lock lock(mutex_);
    if (failure_) return;
    failure_ = failure;
    children = children_;
    work_.notify_one();
  }
  for (const auto& weak : children) {
    if (const auto child = weak.lock()) child->condemn(inherited(failure, child->group_));
  }
}

void MpiCore::condemn_and_tell(const EngineFailure& failure) {
  condemn(failure);
  if (progress_ == Progress::callers_thread && std::this_thread::get_id() == made_on_) advance_callers_engines();
}

void MpiCore::adopt(const std::shared_ptr<MpiCore>& child) {
  std::unique_lock lock(mutex_);
  if (failure_) failure_->raise();
  std::erase_if(children_, [](const auto& weak) { return weak.expired(); });
  children_.push_back(child);
}

void MpiCore::set_timeout(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  timeout_ = timeout;
}

std::chrono::milliseconds MpiCore::timeout() {
  std::unique_lock lock(mutex_);
  return timeout_;
}

}  // namespace gradwire::engine_detail
