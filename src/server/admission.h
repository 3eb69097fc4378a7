// SPDX-License-Identifier: Apache-2.0
// How a worker gets in: its hello is checked against the model, and it is told (welcome) what it needs to begin or to
// go on. The first worker brings the model; if no file has the first weights, it is asked for them, and the others wait
// for their welcome until all of the weights are here.
//
// The initial weights come from a single worker, whole. If it goes away before it has sent all of them, or sends none
// for too long, the next worker that waits is asked, and begins anew.
//
// A model is made without the hub's lock, since it may take a while: a mutex of its own lets one worker at a time in.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "server/hub_context.h"
#include "server/membership.h"
#include "server/saving.h"
#include "server/status.h"

namespace gradwire::server {

class Admission {
 public:
  Admission(HubContext& context, Membership& membership, Status& status, Saving& saving);

  // These take the lock. hello() is false if the worker was refused; Error{frame} if the text is malformed.
  bool hello(const std::shared_ptr<Session>& session, const nlohmann::json& text);
  void set_initial(const std::shared_ptr<Session>& session, uint32_t slot, const Frame& frame, const Blob& payload,
                   std::function<void()> done);

  // With the lock held: a worker has gone, and does not wait or bring weights any more. False if it was the only one
  // that knew the weights: the model and its workers are gone too, and the next worker may train something else.
  bool gone(uint32_t slot);
  // With the lock held: refuses a worker that was asked for the first weights and does not send them.
  void check_initial();

 private:
  std::string reason_against(const Signature& signature);  // empty: it fits, or is the model from now on
  std::shared_ptr<ServerModel> make_model(const Signature& signature) const;
  void read_init(ServerModel& model) const;
  void ask_for_weights(const WorkerRecord& worker);
  void welcome(const WorkerRecord& worker, bool initial);
  void all_ready();

  HubContext& context_;
  Membership& membership_;
  Status& status_;
  Saving& saving_;
  const uint64_t run_;  // a number of this process, by which workers notice a restart
  std::mutex making_;   // taken before the hub's mutex, never after it
  // Guarded by the hub's mutex.
  std::optional<uint32_t> initialiser_;    // the slot that was asked for the first weights
  SteadyClock::time_point initial_since_;  // when it was, or when it last sent some of them
  std::vector<uint32_t> waiting_;          // slots whose welcome waits for them
};

}  // namespace gradwire::server
