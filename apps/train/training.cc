// SPDX-License-Identifier: Apache-2.0
// See training.h.
#include "train/training.h"

#include <fmt/format.h>

#include <cmath>

#include "cli/command.h"
#include "cli/mpi_session.h"
#include "cli/options.h"
#include "gradwire/error.h"

namespace gradwire::app {
namespace {

// The paper's codecs; the collective follows from what is sent.
void fill_in_qadam(TrainingOptions& options) {
  train::Settings& s = options.settings;
  const auto given = [&](const char* name) { return options.command->get_option(name)->count() > 0; };
  for (const char* name : {"--bucket-mb", "--momentum"})
    if (given(name))
      throw Error(ErrorKind::usage, fmt::format("{} is given; allowed is any optimizer but qadam", name + 2), name + 2);
  if (!given("--codec")) s.codec = "loggrid:k=2";
  if (!given("--collective")) s.collective = s.send == "weights" ? "gather" : "scatter";
  if (!given("--down") && s.send == "weights") s.down = "unigrid:bits=8";
}

}  // namespace

void add_training(CLI::App& command, TrainingOptions& options) {
  train::Settings& s = options.settings;
  train::Places& p = options.places;
  options.command = &command;
  const auto number = [&](const char* name, double& value, const char* meaning) {
    command.add_option(name, value, meaning)->type_name("X")->capture_default_str();
  };
  const auto text = [&](const char* name, std::string& value, const char* type, const char* meaning) {
    return command.add_option(name, value, meaning)->type_name(type);
  };

  command.option_defaults()->group("What is trained");
  add_choice(command, "--task", s.task, train::task_names(), "Data set");
  text("--data", p.data, "DIR", "Where its files are; Fashion-MNIST: Debian's place");
  text("--model", s.model, "NAME",
       "mlp, cnn, resnet20, resnet32, resnet18, resnet34, vgg11, vgg16, bilstm, gpt; with parameters as in "
       "mlp:width=2800,depth=2. Default: what suits the task");
  number("--dropout", s.dropout, "Dropout, where the model has a place for it");
  add_whole(command, "--length", s.length, 0, 1 << 20, "Tokens of a text sample; 0: the task's own");
  add_whole(command, "--vocabulary", s.vocabulary, 0, 1 << 24, "Most words that are told apart; 0: the task's own");
  command.add_flag("--words", s.words, "Text: tokens are words instead of characters");
  add_whole(command, "--limit", s.limit, 0, uint64_t{1} << 40, "Use only so many samples; 0: all");

  command.option_defaults()->group("Who does it");
  add_whole(command, "--workers", s.workers, 1, 1024, "Workers");
  add_choice(command, "--engine", options.engine, {"loopback", "mpi"},
             "loopback: threads of this process; mpi: the processes of mpirun");
  add_choice(command, "--device", s.device, {"cpu", "cuda"}, "Where to compute; workers of one process share one GPU");
  add_choice(command, "--precision", s.precision, {"fp32", "bf16", "fp16"}, "What the model computes in (CUDA)");
  add_whole(command, "--threads", s.threads, 0, 1024, "CPU threads of each worker; 0: the cores dealt out");
  command.add_flag("--deterministic", s.deterministic, "CUDA: only kernels that give the same bits every time");

  command.option_defaults()->group("How gradients travel");
  text("--rules", s.rules, "RULES", "Tensors that travel otherwise, e.g. '1d=fp32;*.bias=fp32'");
  text(
      "--down", s.down, "SPEC",
      "scatter: codec of the means; default: as up, rounded to nearest. qadam: of the weights; default unigrid:bits=8");
  add_choice(command, "--feedback", s.feedback, {"codec", "on", "off"}, "Error feedback; codec: as the codec wants it");
  add_choice(command, "--residual", s.residual, {"f32", "bf16"}, "Type of the residuals; bf16 takes half the memory");
  number("--bucket-mb", s.bucket_mb, "Megabytes of gradients that are sent together");

  command.option_defaults()->group("The descent");
  add_whole(command, "--seed", s.seed, 0, UINT64_MAX, "Of weights, data order and rounding");
  add_whole(command, "--epochs", s.epochs, 1, 1000000, "Epochs");
  add_whole(command, "--steps", s.steps, 0, uint64_t{1} << 40, "Stop after so many steps; 0: after the epochs");
  add_whole(command, "--batch", s.batch, 1, 1000000, "Samples of one worker in one pass");
  add_whole(command, "--accumulate", s.accumulate, 1, 10000,
            "Passes whose gradients are added up before they are sent");
  add_choice(command, "--optimizer", s.optimizer, {"sgd", "adam", "adamw", "qadam"}, "Default: what suits the model");
  number("--rate", s.rate, "Learning rate; adam: 0.001 unless given, qadam: 0.001 x root of --workers");
  number("--momentum", s.momentum, "Momentum of sgd");
  number("--weight-decay", s.weight_decay, "Weight decay");
  number("--clip", s.clip, "Largest norm of the mean gradient, qadam: of each worker's own; 0: any");
  add_choice(command, "--schedule", s.schedule, {"constant", "step", "cosine", "theory"},
             "How the learning rate falls; theory, of qadam: with the square root of the steps");
  number("--warmup", s.warmup, "Epochs in which it rises first");
  command.add_option("--drop-at", s.drop_at, "Schedule step: epochs at which it drops, e.g. 100,150")
      ->type_name("E,E")
      ->delimiter(',');
  number("--drop", s.drop, "... to so much of it");

  command.option_defaults()->group("qadam: workers that send updates of their own");
  number("--beta", s.beta, "Of the first moment");
  number("--theta", s.theta, "Of the second moment");
  command.add_flag(
      "!--no-correction", s.correction,
      "As published: the bias of young moments is not corrected, the first updates are several times too large");
  add_choice(command, "--moments", s.moments, {"local", "shared"},
             "Second moments; shared: pooled, for workers whose data differ");
  add_whole(command, "--share-every", s.share_every, 1, 1000000000, "Steps between poolings of shared moments");
  add_choice(command, "--send", s.send, {"weights", "updates"},
             "What goes down: weights, or their updates with error feedback");

  command.option_defaults()->group("What is kept and shown");
  add_whole(command, "--save-every", p.save_every, 0, uint64_t{1} << 40,
            "Steps between checkpoints; 0: after each epoch");
  add_whole(command, "--meter-every", p.meter_every, 0, uint64_t{1} << 40,
            "Steps between measurements of each layer's error; 0: an epoch");
  command.add_flag("--check", p.check, "Compare a hash of all workers' weights at every step");
  number("--timeout", p.timeout, "Seconds until a silent worker is given up");
  command.add_flag("--json", options.json, "Events as JSON lines instead of a table");
  command.option_defaults()->group("Options");
}

void fill_in(TrainingOptions& options) {
  train::Settings& s = options.settings;
  const auto given = [&](const char* name) { return options.command->get_option(name)->count() > 0; };
  if (!given("--model"))
    s.model = s.task == "ag-news"           ? "bilstm"
              : s.task == "text"            ? "gpt"
              : s.task.starts_with("cifar") ? "resnet20"
                                            : "cnn";
  const bool sequence = s.model.starts_with("gpt") || s.model.starts_with("bilstm");
  if (!given("--optimizer") && sequence) s.optimizer = s.model.starts_with("gpt") ? "adamw" : "adam";
  if (s.optimizer == "qadam") fill_in_qadam(options);
  if (s.optimizer != "sgd") {
    // Workers that normalise their own, noisier gradients take steps smaller by about the root of their number than one
    // Adam at the mean gradient would.
    if (!given("--rate")) s.rate = s.optimizer == "qadam" ? 1e-3 * std::sqrt(s.workers) : 1e-3;
    if (!given("--weight-decay")) s.weight_decay = s.optimizer == "adamw" ? 0.1 : 0;
  }
  if (!given("--clip") && s.model.starts_with("gpt")) s.clip = 1;
}

void with_engine(const TrainingOptions& options, const std::function<void(Engine*)>& body) {
  if (options.engine == "loopback") return body(nullptr);
  MpiSession session;
  try {
    body(&session.engine());
  } catch (const Interrupted&) {
    throw;
  } catch (const std::exception& error) {
    // Every rank sees the same usage error; one line is enough. Other errors are this rank's own.
    const int code = exit_code_of(error), rank = session.engine().rank();
    if (rank == 0 || code != kUsage) std::fprintf(stderr, "gradwire: error: rank %d: %s\n", rank, error.what());
    session.abort(code);
  }
}

}  // namespace gradwire::app
