// SPDX-License-Identifier: Apache-2.0
// `gradwire train`: one model, one data set, one codec.
#include <fmt/format.h>

#include <memory>

#include "command.h"
#include "gradwire/error.h"
#include "options.h"
#include "train/run.h"
#include "training.h"

namespace gradwire::app {
namespace {

void train_one(const TrainingOptions& options, Engine* engine) {
  const std::atomic<bool>& stop = catch_interrupts();
  const bool leads = !engine || engine->rank() == 0;
  options.settings.check();
  if (options.places.checkpoint.empty() && (options.places.resume || options.places.save_every > 0)) {
    const char* given = options.places.resume ? "resume" : "save-every";
    throw Error(ErrorKind::usage, fmt::format("{} is given; it needs --checkpoint DIR", given), given);
  }
  const train::Task task = train::load_task(options.settings.task, options.settings.task_options(options.places.data));
  Narrator narrator(options.json);
  train::Listener listener;
  if (leads) listener = [&](const nlohmann::json& event) { narrator.listen(event); };
  const nlohmann::json record = train::run({task, options.settings, options.places, listener, stop}, engine);
  if (!leads) return;
  if (!options.json) Narrator::print_result(record);
  if (record["finished"]) return;
  if (!options.json)
    print(options.places.checkpoint.empty()
              ? "stopped; nothing was saved (no --checkpoint)\n"
              : "stopped and saved; go on with the same command and --resume\n");
  throw Interrupted{};
}

}  // namespace

void add_train(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("train", "Train a model with compressed gradients");
  auto options = std::make_shared<TrainingOptions>();
  command->add_option("--codec", options->settings.codec, "Codec of the gradients")
      ->type_name("SPEC")
      ->capture_default_str();
  add_choice(*command, "--collective", options->settings.collective, {"gather", "scatter"},
             "gather: everybody gets every message; scatter: bytes do not grow with workers");
  add_training(*command, *options);
  command->add_option("--checkpoint", options->places.checkpoint, "Directory to save the run in")->type_name("DIR");
  command->add_flag("--resume", options->places.resume, "Go on from the newest checkpoint there, if there is one");
  command->add_option("--export", options->places.export_to, "Write the weights at the end, for Python's torch.load")
      ->type_name("FILE");
  command->footer(
      "Examples:\n"
      "  gradwire train --task fashion-mnist --model cnn --workers 4 --codec optquant:bits=3 --epochs 5\n"
      "  gradwire train --task cifar10 --data DIR --workers 8 --codec dqsgd:budget=4.5 --device cuda --json\n"
      "  mpirun -n 4 gradwire train --engine mpi --codec qsgd:bits=4");
  command->callback([&action, options] {
    action = [options] {
      with_engine(*options, [&](Engine* engine) {
        if (engine) options->settings.workers = engine->size();
        fill_in(*options);
        train_one(*options, engine);
      });
    };
  });
}

}  // namespace gradwire::app
