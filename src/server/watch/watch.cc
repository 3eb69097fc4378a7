// SPDX-License-Identifier: Apache-2.0
// What the paths of watch.h answer. The page's files are part of the program (cmake/embed.cmake). The policy lets the
// page load its own script and style, ask for the status, and nothing else: a worker's name that slipped into markup
// could still not run.
#include "server/watch/watch.h"

#include "server/watch/metrics.h"
#include "server/watch/watch_status.h"

namespace gradwire::server {
namespace embedded {
extern const std::string_view watch_page_html, watch_page_css, watch_page_js;
}

namespace {

constexpr const char* kHeaders =
    "Cache-Control: no-store\r\n"
    "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "X-Frame-Options: DENY\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Cross-Origin-Opener-Policy: same-origin\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n";

constexpr const char* kPlain = "text/plain; charset=utf-8";

HttpReply fixed(std::string_view text, const char* type, int status = 200) {
  return {status, type, std::make_shared<const std::string>(text)};
}

}  // namespace

Watch::Watch(const std::string& host, int port, std::function<nlohmann::json()> status, WatchOptions options)
    : status_(std::move(status)),
      trouble_(std::move(options.trouble)),
      http_(std::make_unique<HttpServer>(
          host, port, kHeaders, [this](std::string_view path) { return answer(path); }, options.timeouts,
          std::move(options.hosts))) {}

void Watch::refresh() {
  const auto now = SteadyClock::now();
  if (made_ != SteadyClock::time_point{} && now - made_ < kFresh) return;
  json_ = metrics_ = nullptr;
  try {
    const nlohmann::json status = status_();
    // A name that is not UTF-8 is shown with replacement characters.
    json_ = std::make_shared<const std::string>(status.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    metrics_ = std::make_shared<const std::string>(metrics_text(status));
    const nlohmann::json& failed = at(status, {"checkpoint", "last_error"});
    ailment_ = failed.is_string() ? "the checkpoint cannot be saved: " + failed.get<std::string>() + "\n" : "";
  } catch (const std::exception& error) {
    json_ = metrics_ = nullptr;
    failure_ = std::string("no status: ") + error.what() + "\n";
  }
  made_ = SteadyClock::now();  // counted from its end: a slow status is not asked for without pause
}

HttpReply Watch::health() {
  if (const std::string trouble = trouble_ ? trouble_() : ""; !trouble.empty())
    return fixed("workers cannot connect: " + trouble + "\n", kPlain, 503);
  refresh();
  if (!json_) return fixed(failure_, kPlain, 503);
  if (!ailment_.empty()) return fixed(ailment_, kPlain, 503);
  return fixed("ok\n", kPlain);
}

HttpReply Watch::answer(std::string_view path) {
  if (path == "/") return fixed(embedded::watch_page_html, "text/html; charset=utf-8");
  if (path == "/page.css") return fixed(embedded::watch_page_css, "text/css; charset=utf-8");
  if (path == "/page.js") return fixed(embedded::watch_page_js, "text/javascript; charset=utf-8");
  if (path == "/healthz") return health();
  const bool json = path == "/status.json";
  if (!json && path != "/metrics") return fixed("404 Not Found\n", kPlain, 404);
  refresh();
  if (!json_) return fixed(failure_, kPlain, 503);
  if (json) return {200, "application/json", json_};
  return {200, "text/plain; version=0.0.4; charset=utf-8", metrics_};
}

}  // namespace gradwire::server
