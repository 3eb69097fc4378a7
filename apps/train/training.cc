// SPDX-License-Identifier: Apache-2.0
// See training.h.
#include "train/training.h"

#include <fmt/format.h>

#include <cmath>

#include "cli/command.h"
#include "cli/console.h"
#include "cli/mpi_session.h"
#include "cli/options.h"
#include "gradwire/error.h"

namespace gradwire::app {
namespace {

// Defaults of qadam: the codecs that were made for it, and the collective that follows from what is sent.
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
  train::RunPlaces& p = options.places;
  options.command = &command;
  const auto number = [&](const char* name, double& value, const char* meaning) {
    command.add_option(name, value, meaning)->type_name("X")->capture_default_str();
  };
  const auto text = [&](const char* name, std::string& value, const char* type, const char* meaning) {
    return command.add_option(name, value, meaning)->type_name(type);
  };

  command.option_defaults()->group("Task and model");
  add_choice(command, "--task", s.task, train::task_names(), "Data set");
  text("--data", p.data, "DIR",
       "Directory of the data set's files; default for Fashion-MNIST: where Debian's package puts them");
  text("--model", s.model, "NAME",
       "mlp, cnn, resnet20, resnet32, resnet18, resnet34, vgg11, vgg16, bilstm, gpt; with parameters as in "
       "mlp:width=2800,depth=2. Default: a model that suits the task");
  number("--dropout", s.dropout, "Dropout probability, for models that have dropout layers");
  add_whole(command, "--length", s.length, 0, 1 << 20, "Tokens per text sample; 0: the task's default");
  add_whole(command, "--vocabulary", s.vocabulary, 0, 1 << 24,
            "Largest number of different words; 0: the task's default");
  command.add_flag("--words", s.words, "Task text: tokens are words instead of characters");
  add_whole(command, "--limit", s.limit, 0, uint64_t{1} << 40, "Use only the first N samples; 0: all");

  command.option_defaults()->group("Workers");
  add_whole(command, "--workers", s.workers, 1, 1024, "Number of workers");
  add_choice(command, "--engine", options.engine, {"loopback", "mpi"},
             "loopback: workers are threads of this process; mpi: workers are the processes of mpirun");
  add_choice(command, "--device", s.device, {"cpu", "cuda"},
             "Where the model is computed; the workers of one process share one GPU");
  add_choice(command, "--precision", s.precision, {"fp32", "bf16", "fp16"},
             "Precision of the model's arithmetic (bf16 and fp16 need CUDA)");
  add_whole(command, "--threads", s.threads, 0, 1024,
            "CPU threads per worker; 0: the cores are divided among the workers");
  command.add_flag("--deterministic", s.deterministic, "CUDA: use only kernels that give the same bits in every run");

  command.option_defaults()->group("Compression");
  text("--rules", s.rules, "RULES",
       "Codecs of tensors that match a pattern, e.g. '1d=fp32;*.bias=fp32'; the others use --codec");
  text("--down", s.down, "SPEC",
       "Codec of the means with --collective scatter; default: the codec of the gradients, rounding to nearest. "
       "Codec of the weights with --optimizer qadam, default: unigrid:bits=8, and with --server and --optimizer sgd, "
       "default: fp32");
  add_choice(command, "--feedback", s.feedback, {"codec", "on", "off"},
             "Error feedback; codec: on for the codecs that need it");
  add_choice(command, "--residual", s.residual, {"f32", "bf16"},
             "Data type of the residuals; bf16 takes half the memory");
  number("--decay", s.decay,
         "What is left of a residual when it is added to the next step: above 0, to 1. Below 1 old residuals fade");
  add_choice(command, "--exchange", s.exchange, {"auto", "gradients", "momenta"},
             "What workers send each other; auto: momenta where adam or adamw meets a codec with error feedback");
  command
      .add_option(
          "--first-steps", s.first_steps,
          "Where momenta are exchanged: steps at the beginning that use qsgd:bits=4. Default: a tenth of the run")
      ->type_name("N")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40));
  number("--bucket-mb", s.bucket_mb, "Size of a bucket, the gradients that are sent together, in megabytes");

  command.option_defaults()->group("Optimisation");
  add_whole(command, "--seed", s.seed, 0, UINT64_MAX,
            "Seed of the initial weights, the order of the samples and stochastic rounding");
  add_whole(command, "--epochs", s.epochs, 1, 1000000, "Number of epochs");
  add_whole(command, "--steps", s.steps, 0, uint64_t{1} << 40, "Stop after N steps; 0: after the last epoch");
  add_whole(command, "--batch", s.batch, 1, 1000000, "Samples per worker in one backward pass");
  add_whole(command, "--accumulate", s.accumulate, 1, 10000,
            "Backward passes whose gradients are added up before they are sent");
  add_choice(command, "--optimizer", s.optimizer, {"sgd", "adam", "adamw", "qadam"},
             "Optimizer; default: one that suits the model");
  number("--rate", s.rate, "Learning rate; default with adam and adamw: 0.001, with qadam: 0.001 x sqrt(workers)");
  number("--momentum", s.momentum, "Momentum, for sgd");
  number("--weight-decay", s.weight_decay, "Weight decay");
  number("--clip", s.clip,
         "Clip the norm of the mean gradient (qadam and --server: of each worker's gradient) to X; 0: do not clip");
  add_choice(command, "--schedule", s.schedule, {"constant", "step", "cosine", "theory"},
             "How the learning rate decreases; theory, for qadam: with the square root of the step");
  number("--warmup", s.warmup, "Epochs during which the learning rate rises linearly");
  command.add_option("--drop-at", s.drop_at, "Schedule step: epochs at which the learning rate drops, e.g. 100,150")
      ->type_name("E,E")
      ->delimiter(',');
  number("--drop", s.drop, "Schedule step: factor of each drop");

  command.option_defaults()->group("qadam");
  number("--beta", s.beta, "Decay rate of the first moment");
  number("--theta", s.theta, "Decay rate of the second moment");
  command.add_flag(
      "!--no-correction", s.correction,
      "Do not correct the bias of the moments; the method as reconstructed does not either, and the first updates are "
      "then several times too large");
  add_choice(
      command, "--moments", s.moments, {"local", "shared"},
      "local: each worker keeps its own second moments; shared: they are averaged, for workers whose data differ");
  add_whole(command, "--share-every", s.share_every, 1, 1000000000, "Steps between two averagings of shared moments");
  add_choice(command, "--send", s.send, {"weights", "updates"},
             "What is sent back to the workers: weights, or updates with error feedback");

  command.option_defaults()->group("Checkpoints and output");
  add_whole(command, "--save-every", p.save_every, 0, uint64_t{1} << 40,
            "Steps between two checkpoints; 0: one per epoch");
  add_whole(command, "--evaluate-every", p.evaluate_every, 0, uint64_t{1} << 40,
            "Steps between two evaluations on the test set within an epoch; 0: only at the end of each epoch");
  add_whole(command, "--meter-every", p.meter_every, 0, uint64_t{1} << 40,
            "Steps between two measurements of the error of each tensor; 0: one per epoch");
  command.add_flag("--check", p.check, "Compare a hash of all workers' weights after every step");
  number("--timeout", p.timeout, "Seconds to wait for a worker before the run fails");
  command.add_flag("--json", options.json, "Print events as JSON lines instead of a table");
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

// With mpirun the launcher decides the number of workers; another number would be dropped without a word.
static void expect_workers(const TrainingOptions& options, int processes) {
  const int workers = options.settings.workers;
  if (options.command->get_option("--workers")->count() == 0 || workers == processes) return;
  throw Error(ErrorKind::usage,
              fmt::format("workers is {}; with --engine mpi the launcher decides it, and it has started {} process{}; "
                          "start it with mpirun -n {}, or leave --workers out",
                          workers, processes, processes == 1 ? "" : "es", workers),
              "workers");
}

std::string failure_of(const nlohmann::json& record) {
  return fmt::format("{} of {} steps were left out, because their results were not finite",
                     record["skipped_steps"].get<uint64_t>(), record["steps"].get<uint64_t>());
}

void with_engine(const TrainingOptions& options, const std::function<void(Engine*)>& body) {
  if (options.engine == "loopback") return body(nullptr);
  MpiSession session;
  if (session.engine().size() == 1) expect_workers(options, 1);  // no launcher: one line and no MPI_Abort
  try {
    expect_workers(options, session.engine().size());
    body(&session.engine());
  } catch (const Interrupted&) {
    throw;
  } catch (const TrainingFailed&) {  // found after the end: no rank waits for another any more
    throw;
  } catch (const std::exception& error) {
    // Every rank sees the same usage error; one line is enough. Other errors are this rank's own.
    const int code = exit_code_of(error), rank = session.engine().rank();
    if (rank == 0 || code != kUsage) print_error(fmt::format("rank {}: {}", rank, error.what()));
    session.abort(code);
  }
}

}  // namespace gradwire::app
