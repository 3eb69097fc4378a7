// SPDX-License-Identifier: Apache-2.0
// `gradwire train`: one model, one data set, one codec.
#include <fmt/format.h>
#include <unistd.h>

#include <memory>

#include "cli/command.h"
#include "cli/options.h"
#include "gradwire/error.h"
#include "server/server_options.h"
#include "train/console_reporter.h"
#include "train/run.h"
#include "train/training.h"

namespace gradwire::app {
namespace {

void train_one(const TrainingOptions& options, Engine* engine) {
  const std::atomic<bool>& stop = catch_interrupts();
  const bool leads = !engine || engine->rank() == 0;
  options.settings.check();
  if (options.places.checkpoint.empty() &&
      (options.places.resume || options.places.resume_previous || options.places.save_every > 0)) {
    const char* given = options.places.resume            ? "resume"
                        : options.places.resume_previous ? "resume-previous"
                                                         : "save-every";
    throw Error(ErrorKind::usage, fmt::format("{} is given; it needs --checkpoint DIR", given), given);
  }
  const train::Task task = train::load_task(options.settings.task, options.settings.task_options(options.places.data));
  ConsoleReporter reporter(options.json);
  train::Listener listener;
  if (leads) listener = [&](const nlohmann::json& event) { reporter.listen(event); };
  const nlohmann::json record = train::run({task, options.settings, options.places, listener, stop}, engine);
  if (!leads) return;
  if (!options.json) ConsoleReporter::print_result(record);
  if (record["failed"])
    throw TrainingFailed(fmt::format("the training failed: {} (a smaller --rate or a codec that loses less may help)",
                                     failure_of(record)));
  if (record["finished"]) return;
  if (!options.json)
    print(options.places.checkpoint.empty() ? options.places.server ? "stopped, and left the server\n"
                                                                    : "stopped; nothing was saved (no --checkpoint)\n"
                                            : "stopped and saved; continue with the same command and --resume\n");
  throw Interrupted{};
}

void train_for_server(TrainingOptions& options) {
  const auto given = [&](const char* name) { return options.command->get_option(name)->count() > 0; };
  for (const char* name : {"--engine", "--checkpoint", "--resume", "--resume-previous", "--save-every", "--check",
                           "--meter-every", "--collective", "--residual", "--decay", "--exchange", "--first-steps"})
    if (given(name))
      throw Error(ErrorKind::usage,
                  fmt::format("{} is given; it is not allowed with --server, which decides it", name + 2), name + 2);
  if (!given("--optimizer")) options.settings.optimizer = "qadam";
  const std::string& optimizer = options.settings.optimizer;
  if (optimizer == "adam" || optimizer == "adamw") options.settings.exchange = "momenta";
  // The server has the momentum and the weights in full precision; their codec is the user's choice.
  if (options.settings.optimizer == "sgd" && !given("--down")) options.settings.down = "fp32";
  fill_in(options);
  if (options.server.name.empty()) {
    char host[256] = "worker";
    ::gethostname(host, sizeof host - 1);
    options.server.name = fmt::format("{}:{}", host, ::getpid());
  }
  options.places.server = options.server;
  train_one(options, nullptr);
}

}  // namespace

void add_train(CLI::App& app, Action& action) {
  CLI::App* command =
      app.add_subcommand("train", "Train a model on several workers that exchange compressed gradients");
  auto options = std::make_shared<TrainingOptions>();
  command
      ->add_option("--codec,--up", options->settings.codec,
                   "Codec of the gradients; with --optimizer qadam, of the updates")
      ->type_name("SPEC")
      ->capture_default_str();
  add_choice(*command, "--collective", options->settings.collective, {"gather", "scatter"},
             "gather: every worker receives every message; scatter: each worker reduces one shard, so that the bytes "
             "do not grow with the number of workers");
  add_training(*command, *options);
  command->option_defaults()->group("Parameter server (gradwire serve)");
  command
      ->add_option("--server", options->server.address,
                   "Train for this server; --workers is then the number of workers that share the samples")
      ->type_name("HOST:PORT");
  command
      ->add_option("--name", options->server.name,
                   "Name of this worker on the server's pages; default: host name and process number")
      ->type_name("TEXT");
  command
      ->add_option("--patience", options->server.patience_s,
                   "Seconds to keep trying to reach a server that does not answer")
      ->type_name("S")
      ->check(CLI::Range(0.1, 1e7))
      ->capture_default_str();
  add_whole(*command, "--warm-steps", options->server.warm_steps, 0, 1000000,
            "Steps during which a new worker sends nothing, while its moments warm up");
  add_security(*command, options->server.security, false);
  command->option_defaults()->group("Options");
  command->add_option("--checkpoint", options->places.checkpoint, "Directory for checkpoints of the run")
      ->type_name("DIR");
  command->add_flag("--resume", options->places.resume,
                    "Continue from the newest checkpoint in that directory, if there is one");
  command->add_flag("--resume-previous", options->places.resume_previous,
                    "Like --resume; a newest checkpoint that is damaged is set aside, and the one before it is used");
  command
      ->add_option("--export", options->places.export_to,
                   "Write the final weights to this file, for torch.load in Python")
      ->type_name("FILE");
  command->footer(
      "Examples:\n"
      "  gradwire train --task fashion-mnist --model cnn --workers 4 --codec optquant:bits=3 --epochs 5\n"
      "  gradwire train --task cifar10 --data DIR --workers 8 --codec dqsgd:budget=4.5 --device cuda --json\n"
      "  mpirun -n 4 gradwire train --engine mpi --codec qsgd:bits=4");
  command->callback([&action, options] {
    action = [options] {
      if (!options->server.address.empty()) return train_for_server(*options);
      with_engine(*options, [&](Engine* engine) {
        if (engine) options->settings.workers = engine->size();
        fill_in(*options);
        train_one(*options, engine);
      });
    };
  });
}

}  // namespace gradwire::app
