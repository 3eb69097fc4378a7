// SPDX-License-Identifier: Apache-2.0
// The MPI engine: the public side of MpiCore. It borrows MPI: it duplicates the caller's communicator, once for
// payload and once for control, and never initialises or finalises anything. Destroy it before MPI_Finalize.
//
// Making an engine and the last step of split() are collective calls of MPI itself, which know no time-out: a rank
// that never calls make_mpi() is waited for. split() first asks all ranks, with time-out, whether they have arrived,
// and then whether they know that all have, so that MPI_Comm_split is called by all or by none.
#include "gradwire/mpi.h"

#include <algorithm>

#include "engine/mpi_core.h"

namespace gradwire {

namespace {

using namespace engine_detail;

struct MpiHandle : Handle::State {
  MpiHandle(std::shared_ptr<MpiCore> c, std::shared_ptr<MpiOperation> o)
      : core(std::move(c)), operation(std::move(o)) {}
  void wait() override { core->wait(*operation); }

  const std::shared_ptr<MpiCore> core;
  const std::shared_ptr<MpiOperation> operation;
};

class MpiEngine : public Engine {
 public:
  MpiEngine(std::shared_ptr<MpiCore> core, int node, std::shared_ptr<Traffic> parent)
      : core_(std::move(core)), node_(node), traffic_(std::make_shared<Traffic>(std::move(parent))) {}

  std::string name() const override { return "mpi"; }
  int rank() const override { return core_->rank(); }
  int size() const override { return core_->world(); }
  int node() const override { return node_; }
  bool stays_on_its_thread() const override { return core_->progress() == MpiCore::Progress::callers_thread; }

  Handle all_to_all(std::span<const ConstBytes> send, std::span<const Bytes> recv) override {
    return start(all_to_all_call(size(), send, recv));
  }
  Handle all_gather(ConstBytes mine, std::span<const Bytes> recv) override {
    return start(all_gather_call(size(), mine, recv));
  }
  Handle broadcast(Bytes data, int root) override { return start(broadcast_call(size(), rank(), data, root)); }
  Handle barrier() override { return start(barrier_call(size())); }

  std::unique_ptr<Engine> split(int colour) override;

  uint64_t bytes_sent() const override { return traffic_->bytes(); }
  void set_timeout(std::chrono::milliseconds timeout) override { core_->set_timeout(checked_timeout(timeout)); }
  void poison(const std::string& why) override { core_->condemn_and_tell(poisoned(rank(), why)); }

 private:
  Handle start(Call call) {
    const uint64_t bytes = payload_bytes(call, rank());
    auto operation = core_->start(std::move(call));
    traffic_->add(bytes);
    return Handle(std::make_unique<MpiHandle>(core_, std::move(operation)));
  }

  const std::shared_ptr<MpiCore> core_;
  const int node_;
  const std::shared_ptr<Traffic> traffic_;
};

std::unique_ptr<Engine> MpiEngine::split(int colour) {
  std::vector<int> colours(size());
  std::vector<Bytes> recv;
  for (int& c : colours) recv.push_back(std::as_writable_bytes(std::span(&c, 1)));
  Call call = all_gather_call(size(), std::as_bytes(std::span(&colour, 1)), recv);
  call.code = Code::split;
  core_->wait(*core_->start(std::move(call)));
  call = barrier_call(size());
  call.code = Code::split;
  const auto all_know = core_->start(std::move(call));
  if (!core_->wait_complete(*all_know)) core_->wait(*all_know);  // throws what went wrong

  // MPI's colours may not be negative, ours may: the number of smaller ones serves as well.
  std::vector<int> smaller = colours;
  std::sort(smaller.begin(), smaller.end());
  smaller.erase(std::unique(smaller.begin(), smaller.end()), smaller.end());
  const auto index = std::lower_bound(smaller.begin(), smaller.end(), colour) - smaller.begin();
  MPI_Comm payload = MPI_COMM_NULL, control = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split(core_->payload(), static_cast<int>(index), rank(), &payload), "MPI_Comm_split");
  check_mpi(MPI_Comm_dup(payload, &control), "MPI_Comm_dup");
  const auto core = MpiCore::make(payload, control, group_of(colours, rank()), core_->timeout(), core_->progress());
  core_->adopt(core);
  return std::make_unique<MpiEngine>(core, node_, traffic_);
}

// Where the engine may call MPI. Below MPI_THREAD_SERIALIZED the main thread alone may.
MpiCore::Progress allowed_progress() {
  int level = MPI_THREAD_SINGLE, main = 1;
  MPI_Query_thread(&level);
  if (level >= MPI_THREAD_MULTIPLE) return MpiCore::Progress::own_thread;
  MPI_Is_thread_main(&main);
  if (level < MPI_THREAD_SERIALIZED && !main) {
    throw Error(ErrorKind::unsupported,
                std::string("MPI provides ") +
                    (level == MPI_THREAD_FUNNELED ? "MPI_THREAD_FUNNELED" : "MPI_THREAD_SINGLE") +
                    ", so only the thread that initialised MPI may make an engine; other threads need "
                    "MPI_THREAD_MULTIPLE",
                "engine");
  }
  return MpiCore::Progress::callers_thread;
}

// The lowest rank among those that share memory with this one.
int node_of(MPI_Comm communicator) {
  int node = 0;
  MPI_Comm shared = MPI_COMM_NULL;
  MPI_Comm_rank(communicator, &node);
  check_mpi(MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, node, MPI_INFO_NULL, &shared),
            "MPI_Comm_split_type");
  const int code = MPI_Bcast(&node, 1, MPI_INT, 0, shared);
  MPI_Comm_free(&shared);
  check_mpi(code, "MPI_Bcast");
  return node;
}

}  // namespace

bool mpi_built() { return true; }

std::unique_ptr<Engine> make_mpi(MPI_Comm communicator) {
  int initialised = 0, finalised = 0;
  MPI_Initialized(&initialised);
  MPI_Finalized(&finalised);
  if (!initialised || finalised) {
    throw Error(ErrorKind::usage,
                std::string(finalised ? "MPI is finalised already" : "MPI is not initialised") +
                    "; engine mpi needs a caller that has called MPI_Init_thread, best with MPI_THREAD_MULTIPLE",
                "engine");
  }
  const MpiCore::Progress progress = allowed_progress();
  if (communicator == MPI_COMM_NULL)
    throw Error(ErrorKind::usage, "communicator is MPI_COMM_NULL; a group of ranks is needed", "communicator");
  MPI_Comm payload = MPI_COMM_NULL, control = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(communicator, &payload), "MPI_Comm_dup");
  check_mpi(MPI_Comm_dup(payload, &control), "MPI_Comm_dup");
  const int node = node_of(payload);
  return std::make_unique<MpiEngine>(MpiCore::make(payload, control, {}, kDefaultTimeout, progress), node, nullptr);
}

}  // namespace gradwire
