// SPDX-License-Identifier: Apache-2.0
// The parameter server without its transport. Frames come in through received(), answers leave through the sessions
// they came from. docs/server.md has the rules in words. The hub itself only passes frames on to the objects that it is
// made of:
//
//   Membership   the table of workers: who is connected, has left, is lost, and how far each is
//   Admission    hello and welcome, the model, its first weights
//   Steps        updates, steps that close, what goes down
//   Saving       the checkpoint
//   Status       counters, and what people see
//
// Locks. HubContext::mutex guards everything that is not said to belong to a strand. It is held for bookkeeping only,
// never while weights or updates are decoded, encoded or written; two exceptions are small or come before there is any
// work: buffers are decoded under it, and a file of first weights is read under it. Work on a strand may take the
// mutex. A thread that holds the mutex may post to a strand, send through a session and write to the journal, whose own
// locks are therefore always the last, and it must not wait for a strand.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "server/admission.h"
#include "server/hub_context.h"
#include "server/membership.h"
#include "server/saving.h"
#include "server/session.h"
#include "server/status.h"
#include "server/steps.h"

namespace gradwire::server {

class ServerHub {
 public:
  explicit ServerHub(HubOptions options);  // loads the checkpoint, if there is one; Error
  ~ServerHub();

  // `done` is called when the session may send its next frame.
  void received(const std::shared_ptr<Session>& session, const Frame& frame, Blob payload, std::function<void()> done);
  void vanished(const Session* session);
  // By the transport: `why` is "token", "oversize", "version", ...
  void count_refusal(const std::string& why, const std::string& peer, const std::string& words);
  void count_connection(int change) { status_.count_connection(change); }
  void log(const char* event, nlohmann::json fields) { context_.log(event, std::move(fields)); }

  nlohmann::json status() const;
  void stop();                  // saves, tells all workers, and says in the journal if the training has failed
  bool finished() const;        // there were workers, and all have left on purpose
  std::string failure() const;  // in words, why the training has failed; empty if it has not

 private:
  uint32_t check_frame(const Session& session, const Frame& frame);  // the sender's slot; Error{frame}
  void dispatch(const std::shared_ptr<Session>& session, const Frame& frame, Blob payload, std::function<void()> done);
  void goodbye(uint32_t slot);
  void tick();

  // In the order in which they know each other.
  HubContext context_;
  Membership membership_;
  Status status_;
  Saving saving_;
  Steps steps_;
  Admission admission_;
  std::thread ticker_;
  std::condition_variable tick_wake_;
};

}  // namespace gradwire::server
