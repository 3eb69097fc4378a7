// SPDX-License-Identifier: Apache-2.0
// How a worker gets in: its hello is checked against the model, and it is told (welcome) what it needs to begin or to
// go on. The first worker brings the model; if no file has the first weights, it is asked for them, and the others wait
// for their welcome until all of the weights are here.
//
// The initial weights come from a single worker, whole. If it goes away before it has sent all of them, the next
// worker that waits is asked, and begins anew.
#pragma once

#include <functional>
#include <memory>
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

 private:
  std::string reason_against(const Signature& signature);  // empty: it fits, or is the model from now on
  void adopt(const Signature& signature);
  void read_init(ServerModel& model) const;
  void welcome(const WorkerRecord& worker, bool initial);
  void all_ready();

  HubContext& context_;
  Membership& membership_;
  Status& status_;
  Saving& saving_;
  const uint64_t run_;  // a number of this process, by which workers notice a restart
  // Guarded by the hub's mutex.
  std::optional<uint32_t> initialiser_;  // the slot that was asked for the first weights
  std::vector<uint32_t> waiting_;        // slots whose welcome waits for them
};

}  // namespace gradwire::server
