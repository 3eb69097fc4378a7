// SPDX-License-Identifier: Apache-2.0
// An Engine moves bytes between ranks and does not know what they mean. Every operation is asynchronous: it returns a
// Handle, and the buffers belong to the engine until wait() returns. All ranks of an engine must start the same
// operations in the same order.
//
// A peer that does not answer within the time-out, or dies, causes an Error{engine} that names its rank. The engine is
// then poisoned: every later call on it fails at once with the same message, on every rank that can still be reached.
// There is never a hang and never wrong data. A peer that sends another length than expected causes an Error{mismatch}.
//
// Threads: an engine and its handles belong to one thread. While a Reducer exists on an engine, its operations run on
// the reducer's thread, and the program must not start others. An engine that stays on its thread makes the reducer do
// the same: its steps run inside start().
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace gradwire {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

// One operation under way. wait() may be called once; it throws what went wrong. Destroying a handle waits
// for the operation and drops its error; the engine stays poisoned, so the next call reports it.
class Handle {
 public:
  struct State {
    virtual ~State() = default;
    virtual void wait() = 0;
  };
  Handle() = default;
  explicit Handle(std::unique_ptr<State> state);
  Handle(Handle&&) noexcept;
  Handle& operator=(Handle&&) noexcept;
  ~Handle();
  void wait();

 private:
  std::unique_ptr<State> state_;
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual std::string name() const = 0;  // "loopback", "mpi"
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Operations may run only on the thread that made this engine, and bytes may move only inside its calls.
  virtual bool stays_on_its_thread() const { return false; }
  // Ranks with the same number share a node, that is a machine; -1: this engine does not know.
  virtual int node() const { return -1; }

  // send[p] goes to rank p; recv[p] comes from rank p (this rank's own included). Sizes may differ, also be zero.
  virtual Handle all_to_all(std::span<const ConstBytes> send, std::span<const Bytes> recv) = 0;
  // `mine` goes to all ranks; recv[p] comes from rank p (this rank's own included). `mine` may be recv[rank()] itself.
  virtual Handle all_gather(ConstBytes mine, std::span<const Bytes> recv) = 0;
  virtual Handle broadcast(Bytes data, int root) = 0;
  virtual Handle barrier() = 0;

  // Ranks with the same colour form a new engine, ordered by their rank here. Collective over all ranks.
  virtual std::unique_ptr<Engine> split(int colour) = 0;

  virtual uint64_t bytes_sent() const = 0;  // payload bytes this rank has sent to other ranks so far
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;  // default 60 s
  virtual void poison(const std::string& why) = 0;                  // make every later call fail, on all ranks
};

// Ranks that are threads of one process. engines[r] belongs to rank r; each is used by one thread.
std::vector<std::unique_ptr<Engine>> make_loopback(int world);

// Runs body(engine) for every rank on a thread of its own. An exception poisons the engine of its rank; after all ranks
// have ended, the first exception in time is rethrown, not one that followed from it.
void run_loopback(int world, const std::function<void(Engine&)>& body);

bool mpi_built();  // this build has the engine of mpi.h

}  // namespace gradwire
