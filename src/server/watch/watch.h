// SPDX-License-Identifier: Apache-2.0
// Watching a server: a small HTTP port that can be read and nothing else. Everything it shows comes from one object,
// the status, which the server makes when asked:
//
//   /             a live page (with /page.css and /page.js)
//   /status.json  the status as it is
//   /metrics      the same for Prometheus (metrics.h)
//   /healthz      "ok", or 503 with the reason why the server does not do its work
//
// A status is kept for kFresh, so that any number of pollers cost the server four statuses a second at most. There is
// no secret in it but the names of workers and files; still, the port says nothing to pages of other origins.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "server/watch/watch_http.h"

namespace gradwire::server {

struct WatchOptions {
  HttpTimeouts timeouts = {};
  std::vector<std::string> hosts = {};        // names in the Host header that are answered, besides its own
  std::function<std::string()> trouble = {};  // why workers cannot connect at present, or nothing
};

class Watch {
 public:
  static constexpr std::chrono::milliseconds kFresh{250};

  // Error{io, "watch"} with address and reason if the address cannot be had; port 0 is any. `status` is called by a
  // thread of this class, one call at a time; it must not wait for the thread that destroys the Watch. If it throws,
  // /status.json and /metrics answer 503 until it does not.
  Watch(const std::string& host, int port, std::function<nlohmann::json()> status, WatchOptions options = {});
  int port() const { return http_->port(); }

 private:
  using Text = std::shared_ptr<const std::string>;

  HttpReply answer(std::string_view path);
  HttpReply health();
  void refresh();

  // Used by the HTTP thread only.
  std::function<nlohmann::json()> status_;
  std::function<std::string()> trouble_;
  SteadyClock::time_point made_{};
  Text json_, metrics_;            // null: the status could not be had
  std::string failure_, ailment_;  // why there is no status; what the status says is wrong

  std::unique_ptr<HttpServer> http_;  // the last member: its thread ends before the rest goes
};

}  // namespace gradwire::server
