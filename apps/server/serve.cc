// SPDX-License-Identifier: Apache-2.0
// `gradwire serve`: runs a parameter server until it is told to stop.
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "cli/command.h"
#include "cli/console.h"
#include "cli/interrupts.h"
#include "cli/options.h"
#include "cli/version.h"
#include "core/file.h"
#include "gradwire/error.h"
#include "gradwire/version.h"
#include "server/certificates.h"
#include "server/machine.h"
#include "server/rpc/listen.h"
#include "server/server_options.h"
#include "server/watch/watch.h"

namespace gradwire::app {
namespace {

struct ServeOptions {
  server::HubOptions hub;
  server::ListenOptions listen;
  std::string mode = "sync", watch;
  std::vector<std::string> watch_hosts, names;
  std::string make_certificates;
  bool json = false, exit_when_done = false;
};

// One line per event: words, or JSON.
class Journal {
 public:
  explicit Journal(bool json) : json_(json) {}
  void write(nlohmann::json event) const {
    const std::time_t now = std::time(nullptr);
    if (json_) {
      event["time"] = fmt::format("{:%FT%TZ}", fmt::gmtime(now));
      print(event.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    } else {
      std::string line = fmt::format("{:%T}  {}", fmt::localtime(now), event.value("event", ""));
      for (const auto& [key, value] : event.items())
        if (key != "event")
          line += fmt::format("  {} {}", key, value.is_string() ? value.get<std::string>() : value.dump());
      // Names come from workers: print() sees to control characters, but a line must stay one line.
      std::replace(line.begin(), line.end(), '\n', '?');
      print(line + "\n");
    }
    std::fflush(stdout);
  }

 private:
  bool json_;
};

// A thousand connections need a thousand files.
void raise_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

void check(const ServeOptions& options) {
  const std::string path = place_of(options.hub.checkpoint);
  if (!options.hub.init.empty() && ::access(options.hub.init.c_str(), R_OK) != 0)
    throw Error(ErrorKind::io, fmt::format("init: {} cannot be read: {}", options.hub.init, std::strerror(errno)),
                "init");
  if (path.empty()) return;
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  if (::access(folder.c_str(), W_OK) != 0)  // an error now is better than one at the first checkpoint
    throw Error(ErrorKind::io, fmt::format("checkpoint: {} cannot be written to: {}", folder, std::strerror(errno)),
                "checkpoint");
}

// The page is plain text, and whoever reaches it can read it.
void check_watch(const ServeOptions& options) {
  if (options.watch.empty() || options.listen.security.insecure) return;
  const server::HostPort address = server::parse_address(options.watch, "watch");
  if (!server::is_loopback(address.host))
    throw Error(ErrorKind::usage,
                fmt::format("watch: {} is beyond this machine, and the page has neither encryption nor a password: say "
                            "--insecure, or put a proxy in front of an address of this machine",
                            options.watch),
                "insecure");
}

void print_certificates(const ServeOptions& options) {
  const std::vector<std::string> names = options.names.empty() ? default_names() : options.names;
  const MadeCertificates made = make_certificates(options.make_certificates, names);
  print(fmt::format(
      "made an authority, certificates and a token in {0}; the server's certificate is for {1}\n\n"
      "the server:\n"
      "  gradwire serve --listen 0.0.0.0:7070 --tls-cert {2} --tls-key {3} --tls-ca {4} --token-file {5}\n\n"
      "a worker, which needs {4}, {6}, {7} and {5}:\n"
      "  gradwire train --server {8}:7070 --tls-ca {4} --tls-cert {6} --tls-key {7} --token-file {5}\n\n"
      "{0}/ca.key makes further certificates. Neither the server nor a worker needs it: keep it elsewhere.\n",
      options.make_certificates, fmt::join(names, ", "), made.server, made.server_key, made.ca, made.token, made.worker,
      made.worker_key, names.back()));
}

void serve(ServeOptions& options) {
  if (!options.make_certificates.empty()) return print_certificates(options);
  const std::atomic<bool>& stop = catch_interrupts();
  raise_file_limit();
  const Journal journal(options.json);
  options.hub.async = options.mode == "async";
  options.hub.log = [&](const nlohmann::json& event) { journal.write(event); };
  check(options);
  check_watch(options);
  if (!options.watch.empty()) options.listen.spare_files += server::HttpServer::kMaxConnections + 4;
  server::ServerHub hub(options.hub);
  server::RpcListener listener(hub, options.listen);
  const auto status = [&] {
    nlohmann::json now = hub.status();
    now["build"] = {{"version", kVersionString}, {"commit", commit_text()}};
    now["sockets"] = listener.sockets();
    now["cut_off"] = listener.cut_off();
    return now;
  };
  std::optional<server::Watch> watch;
  if (!options.watch.empty()) {
    const server::HostPort address = server::parse_address(options.watch, "watch");
    watch.emplace(address.host, address.port, status,
                  server::WatchOptions{.hosts = options.watch_hosts, .trouble = [&] { return listener.trouble(); }});
    journal.write({{"event", "watch"}, {"page", fmt::format("http://{}:{}/", address.host, watch->port())}});
  }
  const server::HostPort address = server::parse_address(options.listen.address, "listen");
  journal.write({{"event", "listening"},
                 {"address", fmt::format("{}:{}", address.host, listener.port())},
                 {"mode", options.mode},
                 {"min_workers", options.hub.min_workers}});
  while (!stop && !(options.exit_when_done && hub.finished()))
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  hub.stop();
  if (const std::string why = hub.failure(); !why.empty()) throw TrainingFailed("the training failed: " + why);
}

}  // namespace

void add_serve(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("serve", "Run a parameter server");
  auto options = std::make_shared<ServeOptions>();
  ServeOptions& o = *options;
  const auto text = [&](const char* name, std::string& value, const char* type, const char* meaning) {
    return command->add_option(name, value, meaning)->type_name(type)->capture_default_str();
  };
  const auto seconds = [&](const char* name, double& value, const char* meaning) {
    command->add_option(name, value, meaning)->type_name("S")->check(CLI::Range(0.01, 1e7))->capture_default_str();
  };
  command->option_defaults()->group("Addresses and security");
  text("--listen", o.listen.address, "HOST:PORT", "The address for workers; port 0 takes any free port");
  text("--watch", o.watch, "HOST:PORT",
       "The address of a page for people, with /metrics for Prometheus and /status.json");
  command
      ->add_option("--watch-host", o.watch_hosts,
                   "A name or address by which browsers and proxies may ask for the page, besides the one of --watch; "
                   "may be given several times")
      ->type_name("NAME")
      ->allow_extra_args(false);
  add_security(*command, o.listen.security, true);
  text("--make-certificates", o.make_certificates, "DIR",
       "Make an authority, certificates for a server and its workers, and a token in DIR, and end");
  command
      ->add_option("--names", o.names,
                   "With --make-certificates: the names and addresses by which workers reach the server; by default "
                   "localhost and the name of this machine")
      ->type_name("NAME,...")
      ->delimiter(',');
  add_whole(*command, "--max-connections", o.listen.max_connections, 1, 100000,
            "The largest number of connections at the same time");

  command->option_defaults()->group("Workers and steps");
  add_whole(*command, "--min-workers", o.hub.min_workers, 1, 100000,
            "No step is made while fewer workers are connected");
  add_whole(*command, "--max-workers", o.hub.max_workers, 1, 100000, "Workers beyond this number are refused");
  add_choice(*command, "--mode", o.mode, {"sync", "async"},
             "sync: all workers make steps together; async: an update is applied when it comes");
  add_whole(*command, "--staleness", o.hub.staleness, 0, 1000000,
            "async: how many steps a worker may be ahead of the slowest");
  seconds("--deadline", o.hub.deadline_s, "How long a step (async: an answer) waits for the slowest workers");
  seconds("--initial", o.hub.initial_s,
          "How long the first worker may take for each shard of the first weights before another is asked");
  seconds("--rejoin", o.hub.rejoin_s, "A worker that vanished counts as lost after this time");
  seconds("--return", o.hub.return_s, "How long a restarted server waits for the workers it knew");
  add_whole(*command, "--threads", o.hub.threads, 0, 1024, "Threads that decode and encode; 0: one per processor");
  o.hub.limits.max_elements = server::default_max_elements();
  add_whole(*command, "--max-elements", o.hub.limits.max_elements, 1, uint64_t{1} << 40,
            "The largest number of elements of a model; by default, what fits into a quarter of the memory");
  command->add_flag("--bench", o.hub.bench, "Take the workers of gradwire load, which train nothing, and no others");

  command->option_defaults()->group("Files and output");
  text("--checkpoint", o.hub.checkpoint, "FILE", "The checkpoint, a safetensors file: loaded if it exists, and saved");
  add_whole(*command, "--save-every", o.hub.save_every, 1, 1000000,
            "Steps between two checkpoints; workers keep their updates for that long");
  text("--init", o.hub.init, "FILE",
       "The initial weights, a safetensors file; without it the first worker brings them");
  command->add_flag("--exit-when-done", o.exit_when_done, "Stop when all workers have left");
  command->add_flag("--json", o.json, "Print each event as a JSON object on a line");
  command->option_defaults()->group("Options");
  command->footer(
      "Examples:\n"
      "  gradwire serve --listen 127.0.0.1:7070 --min-workers 2 --checkpoint ps.gwc --watch 127.0.0.1:7071\n"
      "  gradwire train --server 127.0.0.1:7070 --optimizer qadam --up loggrid:k=2 --down unigrid:bits=8\n"
      "  gradwire serve --make-certificates certificates --names ps.example.org\n"
      "  gradwire serve --listen 0.0.0.0:7070 --tls-cert certificates/server.pem --tls-key certificates/server.key \\\n"
      "    --tls-ca certificates/ca.pem --token-file certificates/token");
  command->callback([&action, options] { action = [options] { serve(*options); }; });
}

}  // namespace gradwire::app
