// SPDX-License-Identifier: Apache-2.0
// The callers' side of an MPI engine's core: how it is made and ends, and how threads hand it operations, wait for them
// and poison it. What the progress thread does with them is in mpi_progress.cc, the protocol in mpi_core.h.
#include "engine/mpi_core.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>

#include "core/check.h"

namespace gradwire::engine_detail {

namespace {

std::atomic<size_t> piece_bytes{size_t{1} << 30};

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

MpiCore::MpiCore(MPI_Comm payload, MPI_Comm control, std::vector<int> group, std::chrono::milliseconds timeout)
    : payload_(payload),
      control_(control),
      group_(std::move(group)),
      piece_bytes_(piece_bytes.load()),
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
  thread_ = std::thread([this] { run(); });
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
  thread_.join();
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
  std::unique_lock lock(mutex_);
  if (failure_) failure_->raise();
  const auto operation = std::make_shared<MpiOperation>(started_++, std::move(call));
  const Offer own = offer_to(operation->call, rank_);
  if (const auto failure = compare(operation->sequence, rank_, own, rank_, own)) {
    lock.unlock();
    condemn(*failure);
    failure->raise();
  }
  orders_.push_back(operation);
  work_.notify_one();
  return operation;
}

bool MpiCore::wait_complete(MpiOperation& operation) {
  std::unique_lock lock(mutex_);
  operation.waited_since = SteadyClock::now();
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
