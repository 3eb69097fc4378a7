// SPDX-License-Identifier: Apache-2.0
// The heart of one MPI engine: two communicators, a progress thread, and what the ranks tell each other.
//
// Open MPI moves bytes only inside MPI calls, so a progress thread makes them all: callers queue operations and sleep.
// Below MPI_THREAD_MULTIPLE there is no such thread. The thread that made the engine then does the same work inside
// start(), wait(), condemn_and_tell() and the destructor, for all of its engines at once: ranks that wait for different
// engines would wait for each other otherwise.
//
// The `control` communicator carries small messages, in order between two ranks:
//   offer   I have started operation n: code, root, bytes I send you and expect from you
//   stop    I am poisoned, for this reason; I posted payload with you for the operations before n, and never will again
//   bye     I am going, having started n operations; nothing follows
//   ack     the answer to bye by a rank that stays; nothing follows
// The `payload` communicator carries the bytes. They are posted, on both sides, only once the two offers agree: ranks
// that disagree find out with nothing in the air. Operations are posted with a peer in the order of their numbers.
//
// A wait that fails must leave its buffers untouched by MPI, and sends cannot be cancelled in Open MPI. That is what
// the number in `stop` is for: what the peer has posted too will end, and is waited for; what the peer will never post
// is cancelled (receives) or given up (sends: no rank will ever read them). Only a peer whose process is frozen in the
// middle of a transfer allows neither: a few seconds later the wait throws all the same, and its message says that MPI
// still holds the buffers, because it may touch them if the peer ever wakes.
//
// With Open MPI 4.1 a killed rank does not get this far: the launcher ends the whole job.
#pragma once

#define OMPI_SKIP_MPICXX 1   // the C interface only
#define MPICH_SKIP_MPICXX 1  // likewise
#include <mpi.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "core/clock.h"
#include "engine/call.h"

namespace gradwire::engine_detail {

void check_mpi(int code, const char* call);  // throws Error{engine} with MPI's words

// One message carries at most this many bytes: counts are ints in MPI. All ranks must have the same; for tests.
size_t set_chunk_bytes(size_t bytes);  // for engines made from now on; returns the former

struct MpiOperation {
  MpiOperation(uint64_t number, Call c) : sequence(number), call(std::move(c)), open(call.send.size(), 0) {}
  std::string describe() const { return engine_detail::describe(call.code, call.root, sequence); }

  const uint64_t sequence;
  const Call call;

  // Guarded by MpiCore::mutex_.
  bool over = false;      // MPI will not touch the buffers again
  bool complete = false;  // and all bytes have moved
  bool held = false;      // the exception: a peer froze with bytes in the air
  std::optional<SteadyClock::time_point> waited_since;

  // The progress thread's own.
  int agreed = 0;         // peers whose offers fit
  std::vector<int> open;  // requests in the air, by peer
  SteadyClock::time_point moved{};
};

class MpiCore {
 public:
  enum class Progress { own_thread, callers_thread };
  // Owns the communicators from here on. group[i]: the rank in the engine this one was split from.
  static std::shared_ptr<MpiCore> make(MPI_Comm payload, MPI_Comm control, std::vector<int> group,
                                       std::chrono::milliseconds timeout, Progress progress);
  MpiCore(MPI_Comm payload, MPI_Comm control, std::vector<int> group, std::chrono::milliseconds timeout,
          Progress progress);
  ~MpiCore();
  MpiCore(const MpiCore&) = delete;
  MpiCore& operator=(const MpiCore&) = delete;

  int rank() const { return rank_; }
  int world() const { return world_; }
  MPI_Comm payload() const { return payload_; }
  Progress progress() const { return progress_; }

  std::shared_ptr<MpiOperation> start(Call call);
  void wait(MpiOperation& operation);
  bool wait_complete(MpiOperation& operation);  // false: it failed. Does not mind poison that came after its end.
  void condemn(const EngineFailure& failure);
  void condemn_and_tell(const EngineFailure& failure);  // for callers: peers hear of it without another call
  void adopt(const std::shared_ptr<MpiCore>& child);    // poison reaches it from now on
  void set_timeout(std::chrono::milliseconds timeout);
  std::chrono::milliseconds timeout();

 private:
  enum class ControlType : uint32_t { offer, stop, bye, ack };
  struct ControlMessage;
  struct Peer {
    std::deque<Offer> offers;            // of operations not agreed on yet; the first is number `agreed`
    uint64_t agreed = 0;                 // operations posted with this peer
    std::optional<uint64_t> stopped_at;  // the number in its stop
    std::optional<uint64_t> left_after;  // the number in its bye
    bool heard_last = false;             // nothing more comes from it
    bool told_last = false;              // nothing more may go to it
    std::vector<std::byte> inbox;
  };
  struct Transfer {
    std::shared_ptr<MpiOperation> operation;
    int peer;
    bool receive;
  };

  void run() noexcept;
  bool advance() noexcept;
  static bool advance_callers_engines() noexcept;
  void expect_own_thread() const;
  bool turn();
  bool take_orders();
  void admit(const std::shared_ptr<MpiOperation>& operation);
  void match(int peer);
  void post(const std::shared_ptr<MpiOperation>& operation, int peer);
  bool poll_payload();
  bool poll_control();
  void listen(int peer);
  void on_control(int peer, std::span<const std::byte> message);
  void tell(int peer, const ControlMessage& head, std::string_view text = {});
  void stop();
  void drain();
  bool settle();
  void check_deadlines();
  bool closed();
  void rest(bool progressed);
  void give_up(const std::string& why) noexcept;
  void leak_inboxes();

  const MPI_Comm payload_;
  const MPI_Comm control_;
  const std::vector<int> group_;
  const size_t piece_bytes_;
  const Progress progress_;
  const std::thread::id made_on_ = std::this_thread::get_id();
  int rank_ = 0;
  int world_ = 0;

  std::mutex mutex_;
  std::condition_variable work_;  // wakes the progress thread
  std::condition_variable done_;  // wakes the threads that wait for an operation
  std::optional<EngineFailure> failure_;
  std::deque<std::shared_ptr<MpiOperation>> orders_;
  std::vector<std::weak_ptr<MpiCore>> children_;
  std::chrono::milliseconds timeout_;
  uint64_t started_ = 0;
  bool closing_ = false;

  // Of the thread that makes progress alone.
  std::map<uint64_t, std::shared_ptr<MpiOperation>> operations_;
  std::vector<Peer> peers_;
  std::vector<MPI_Request> listening_;  // by peer
  std::vector<MPI_Request> requests_;   // payload, beside transfers_
  std::vector<Transfer> transfers_;
  std::vector<MPI_Request> telling_;  // beside told_
  std::vector<std::vector<std::byte>> told_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  uint64_t admitted_ = 0;
  std::optional<SteadyClock::time_point> stopped_;  // since when
  std::optional<SteadyClock::time_point> leaving_;
  int idle_turns_ = 0;
  bool leaky_ = false;  // something was left in the air: nothing it may touch is freed
  bool ended_ = false;  // there will be no more progress: the engine is closed, or MPI has failed
  std::thread thread_;
};

}  // namespace gradwire::engine_detail
