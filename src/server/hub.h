// SPDX-License-Identifier: Apache-2.0
// The parameter server without its transport: who is here, which step it is, what is applied, what is saved. Frames come in
// through received(), answers leave through the sessions they came from. docs/server.md has the rules in words.
//
//   hub.cc         sessions and members: hello, first weights, going away
//   hub_steps.cc   updates, steps that close, what goes down
//   hub_save.cc    the checkpoint: copied part by part, written by a thread of its own
//   hub_status.cc  what people see
//
// A part belongs to its strand, and only work posted there touches it. Everything else is guarded by one mutex, which is
// held for bookkeeping only, never while weights or updates are decoded, encoded or written. Two things are done under it all
// the same: buffers, which are small, are decoded, and a file of first weights is read, before which nobody can do anything.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "server/checkpoint.h"
#include "server/clock.h"
#include "server/frame.h"
#include "server/ledger.h"
#include "server/part.h"
#include "server/signature.h"
#include "server/strands.h"

namespace gradwire::server {

// Why a worker is sent away. A transport tells it with the words.
enum class Refusal { signature, full, protocol, malformed, slow, replaced, stopping };

// One connection, as the transport has it. All calls may come from any thread.
class Session {
 public:
  virtual ~Session() = default;
  virtual void send(const Frame& frame, const Blob& payload) = 0;  // payload may be null
  virtual void refuse(Refusal why, const std::string& words) = 0;  // the last words
  virtual std::string peer() const = 0;
  virtual uint64_t bytes_in() const = 0;  // payloads and heads
  virtual uint64_t bytes_out() const = 0;
};

struct HubOptions {
  uint32_t min_workers = 1, max_workers = 256;
  bool async = false;
  uint64_t staleness = 4;    // async: updates that a worker may be ahead of the slowest
  double deadline_s = 30;    // a step waits so long for those who are late
  double rejoin_s = 300;     // a worker that vanished is given up for lost after
  double return_s = 60;      // after a restart the server waits so long for the workers it knew
  std::string checkpoint;    // file; empty: nothing is saved
  uint64_t save_every = 50;  // steps
  std::string init;          // a safetensors file with the first weights
  Limits limits;
  int threads = 0;  // 0: as many as the machine has
  uint64_t part_elements = uint64_t{1} << 20;
  std::function<void(const nlohmann::json&)> log;  // may be empty; called from many threads, one at a time
  std::function<void(const char*)> save_hook;      // tests
};

class Hub {
 public:
  explicit Hub(HubOptions options);  // loads the checkpoint, if there is one; Error
  ~Hub();

  // `done` is called when the session may send its next frame.
  void received(const std::shared_ptr<Session>& session, const Frame& frame, Blob payload, std::function<void()> done);
  void vanished(const Session* session);
  void count_refusal(const std::string& why);  // by the transport: "token", "oversize", "version", ...
  void count_connection(int change) { connections_ += change; }

  nlohmann::json status() const;
  void stop();            // saves, tells everybody
  bool finished() const;  // there were workers, and all have left on purpose

 private:
  struct Member {
    std::string id, name;
    uint32_t slot = 0;
    std::shared_ptr<Session> session;  // null: away
    bool left = false, lost = false, awaited = false;
    std::vector<char> lags;                             // per part: steps do not wait for it
    std::vector<uint64_t> clock;                        // async, per part: updates
    Clock::time_point joined, here, last_update, away;  // here: since its last hello
    uint64_t updates = 0, late = 0, step = 0, staleness = 0, bytes_up = 0, bytes_down = 0;
    std::optional<double> loss;
  };
  // An answer that is due when the part has reached a version.
  struct Waiter {
    uint32_t slot;
    std::shared_ptr<Session> session;
    Frame request;
    uint64_t version;
    Verdict verdict;
    Clock::time_point since;
  };
  struct Desk {  // belongs to the part's strand
    std::unique_ptr<Part> part;
    std::vector<Waiter> waiters;
    Clock::time_point since;  // somebody waits for the step to close
  };
  struct Copy {  // a checkpoint in the making
    std::vector<PartState> parts;
    size_t missing = 0;
    std::vector<std::weak_ptr<Session>> leavers;  // wait until what they handed over is on disk
    std::set<uint32_t> left;
  };
  struct Model {
    Signature signature;
    std::vector<Cut> cuts;
    std::vector<Desk> desks;
    Plan buffer_plan;
    std::unique_ptr<Runner> buffer_runner;
    // Guarded by the hub's mutex: what strands tell.
    std::vector<uint64_t> versions, durable;
    std::vector<double> applied;
    std::vector<std::map<uint32_t, Tally>> tallies;
    std::vector<uint64_t> bytes;
    std::vector<char> ready;
    std::vector<char> open;  // somebody waits for an answer
    Blob buffers;

    explicit Model(const Signature& signature, uint64_t part_elements);
    size_t weight_parts() const;
    uint64_t step() const;  // that all parts have reached
    bool whole() const;     // all parts are ready
  };
  using Lock = std::unique_lock<std::mutex>;

  // hub.cc
  void hello(const std::shared_ptr<Session>& session, const nlohmann::json& text);
  void adopt(const Signature& signature);  // the first worker's; with the lock held, as all below that take a Member
  void welcome(Member& member, bool initial);
  void set_initial(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame, const Blob& payload,
                   std::function<void()> done);
  void all_ready();
  void take_buffers(const Blob& payload);
  void take_report(Member& member, const nlohmann::json& text);
  void goodbye(Member& member);
  void end_session(Member& member);
  void forget_oldest();
  Member* member_of(const Session* session);
  uint32_t present() const;
  uint32_t keeper() const;
  void tick();
  void say(const char* event, nlohmann::json fields) const;

  // hub_steps.cc
  void take_update(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame, Blob payload,
                   std::function<void()> done);
  void take_pull(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame,
                 std::function<void()> done);
  void take_handover(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame, Blob payload,
                     std::function<void()> done);
  void try_close(const std::shared_ptr<Model>& model, uint32_t part, bool overdue);
  void answer(const std::shared_ptr<Model>& model, uint32_t part, const Waiter& waiter);
  void answer_due(const std::shared_ptr<Model>& model, uint32_t part);
  void note_part(const std::shared_ptr<Model>& model, uint32_t part);
  void count_verdict(uint32_t slot, Verdict verdict, uint64_t staleness);
  bool may_run_ahead(uint32_t part, uint32_t slot) const;
  void take_clock(Member& member, uint32_t part);
  bool refuse_unready(const Model& model, uint32_t part, Session& session);
  void post(uint32_t part, std::function<void()> work);
  void wait(Model& model, uint32_t part, const Waiter& waiter);
  void recheck();  // all parts, after somebody came or went
  uint64_t save_interval() const;
  bool disk_holds_us_up(const Model& model, uint32_t part) const;

  // hub_save.cc
  void load();
  void want_save();
  void save_loop();
  ServerState state_of(const Model& model, const Copy& copy) const;
  void tell_durable(const Model& model);

  HubOptions options_;
  Clock::time_point started_ = Clock::now();

  mutable std::mutex mutex_;
  std::shared_ptr<Model> model_;
  std::map<uint32_t, Member> members_;        // by slot
  std::map<const Session*, uint32_t> slots_;  // of sessions
  std::vector<uint32_t> waiting_;             // members whose welcome waits for the first weights
  std::optional<uint32_t> initialiser_;
  uint32_t next_slot_ = 0;
  bool stopping_ = false;
  uint64_t bytes_up_ = 0, bytes_down_ = 0;  // messages
  uint64_t step_ = 0;
  uint64_t staleness_sum_ = 0, staleness_count_ = 0, staleness_max_ = 0;
  std::map<std::string, uint64_t> refused_;
  std::vector<std::pair<uint64_t, double>> losses_;
  uint64_t loss_stride_ = 1;
  std::deque<std::pair<Clock::time_point, uint64_t>> pace_;  // when which step began, of the last minute
  std::atomic<int> connections_{0};
  uint64_t run_ = 0;  // a number of this process, so that workers notice a restart

  // The checkpoint.
  std::condition_variable save_wake_;
  std::shared_ptr<Copy> copy_;      // parts are being copied
  std::shared_ptr<Copy> to_write_;  // complete
  bool save_again_ = false, save_stop_ = false, save_retry_ = false, draining_ = false;
  uint64_t saved_ = 0, save_failed_ = 0, save_bytes_ = 0;
  std::string save_error_;
  std::optional<Clock::time_point> save_time_;
  std::thread saver_, ticker_;
  std::condition_variable tick_wake_;
  mutable std::mutex log_mutex_;
  std::unique_ptr<Strands> strands_;  // of the parts
};

}  // namespace gradwire::server
