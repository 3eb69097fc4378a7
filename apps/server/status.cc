// SPDX-License-Identifier: Apache-2.0
// `gradwire status`: prints the status of a parameter server.
#include <CLI/CLI.hpp>
#include <memory>

#include "cli/command.h"
#include "cli/console.h"
#include "cli/options.h"
#include "server/rpc/dial.h"
#include "server/server_options.h"
#include "server/watch/status_text.h"

namespace gradwire::app {

void add_status(CLI::App& app, Action& action) {
  struct StatusOptions {
    server::DialOptions dial{"127.0.0.1:7070", {}};
    double timeout = 10;
    bool json = false;
  };
  CLI::App* command = app.add_subcommand("status", "Print the status of a parameter server");
  auto options = std::make_shared<StatusOptions>();
  command->add_option("--server", options->dial.address, "The address of the server")
      ->type_name("HOST:PORT")
      ->capture_default_str();
  command->add_option("--timeout", options->timeout, "How long to wait for the answer, in seconds")
      ->type_name("S")
      ->check(CLI::Range(0.01, 1e6))
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print the whole status as JSON");
  add_security(*command, options->dial.security, false);
  command->footer("Example:\n  gradwire status --server 127.0.0.1:7070");
  command->callback([&action, options] {
    action = [options] {
      const nlohmann::json status = server::fetch_status(options->dial, options->timeout);
      print(options->json ? status.dump(2) + "\n" : server::status_text(status));
    };
  });
}

}  // namespace gradwire::app
