// SPDX-License-Identifier: Apache-2.0
// The options of a training run. Those that decide its weights (Settings) are kept in checkpoints and compared when a
// run is resumed; paths and options of the output (RunPlaces) may differ.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "gradwire/collective.h"
#include "optim/adam.h"
#include "optim/qadam.h"
#include "server/endpoint.h"
#include "train/data.h"

namespace gradwire::train {

// The first steps of a run may have another codec, without feedback.
struct FirstSteps {
  uint64_t steps = 0;
  std::string up, down;
};

struct Settings {
  // The task and the model.
  std::string task = "fashion-mnist";
  std::string model = "cnn";
  int64_t length = 0, vocabulary = 0;  // as in TaskOptions
  bool words = false;
  uint64_t limit = 0;
  double dropout = 0;

  // The workers.
  int workers = 4;
  std::string device = "cpu";      // or cuda
  std::string precision = "fp32";  // or bf16, fp16: the precision of the model's arithmetic, on CUDA
  bool deterministic = false;
  int threads = 0;  // of one worker, on the CPU; 0: the cores are divided among the workers

  // Compression.
  std::string codec = "qsgd:bits=4";
  std::string rules;  // codecs of tensors that match a pattern: "1d=fp32;*.bias=fp32"
  std::string down;   // scatter: the codec of the means; empty: as up. qadam with weights: their codec
  std::string collective = "scatter";
  std::string feedback = "codec";  // or on, off
  std::string residual = "f32";    // or bf16: half the memory
  double decay = 1;                // what is left of a residual when it is added to the next step
  double bucket_mb = 25;           // megabytes of gradients that are sent together
  std::string exchange = "auto";   // or gradients, momenta: what workers exchange
  int64_t first_steps = -1;        // with momenta: steps with the codec kFirstCodec; -1: a tenth of the run

  // Optimisation.
  uint64_t seed = 1;
  int epochs = 5;
  uint64_t steps = 0;  // stop after this many; 0: after the epochs
  int batch = 64;      // samples of one worker in one backward pass
  int accumulate = 1;  // backward passes per step
  std::string optimizer = "sgd";
  double rate = 0.05, momentum = 0.9, weight_decay = 5e-4, clip = 0;
  std::string schedule = "cosine";
  double warmup = 0;            // epochs
  std::vector<double> drop_at;  // epochs
  double drop = 0.1;

  // Only for qadam.
  double beta = 0.9, theta = 0.999;
  bool correction = true;         // of the bias of the moments
  std::string moments = "local";  // or shared: the second moments are averaged over the workers
  uint64_t share_every = 16;      // steps
  std::string send = "weights";   // or updates: what is sent back

  TaskOptions task_options(const std::string& directory) const;
  ReduceOptions reduce_options() const;
  AdamOptions adam_options() const;
  QAdamOptions qadam_options() const;
  bool keeps_residuals() const;  // of what workers send
  ReduceOptions::Feedback feedback_rule() const;
  // Codecs with error feedback do not suit Adam's second moments, unless momenta are exchanged (optim/momentum.h).
  bool exchanges_momenta() const;
  FirstSteps first_steps_of(uint64_t steps) const;
  std::string up() const;      // rules and codec as one text
  std::string label() const;   // the same as the user gave them, for people
  std::string extras() const;  // further choices, as text for reports
  uint64_t steps_per_epoch(uint64_t samples) const;
  uint64_t total_steps(uint64_t samples) const;
  // Throws Error{usage} that names the first setting that is refused.
  void check() const;

 private:
  void check_qadam() const;
  void check_exchange() const;
  void check_decay() const;
  std::string with_rules(const std::string& codec) const;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Settings, task, model, length, vocabulary, words, limit, dropout, workers, device,
                                   precision, deterministic, threads, codec, rules, down, collective, feedback,
                                   residual, decay, bucket_mb, exchange, first_steps, seed, epochs, steps, batch,
                                   accumulate, optimizer, rate, momentum, weight_decay, clip, schedule, warmup, drop_at,
                                   drop, beta, theta, correction, moments, share_every, send)

// A parameter server, and how this process joins it as a worker.
struct ServerPlace {
  std::string address;  // HOST:PORT
  server::Security security;
  std::string name;         // of this worker, shown by the server
  double patience_s = 600;  // how long to keep trying to reach a server that does not answer
  uint64_t warm_steps = 0;  // during which this worker sends nothing at first
};

struct RunPlaces {
  std::string data;                   // directory of the data set
  std::string checkpoint;             // directory; empty: nothing is saved
  bool resume = false;                // continue from the newest checkpoint there
  bool resume_previous = false;       // the same; if it is damaged, set it aside and take the one before
  uint64_t save_every = 0;            // steps; 0: after each epoch
  std::string export_to;              // weights for Python's torch.load, at the end
  uint64_t evaluate_every = 0;        // steps between two evaluations; 0: once per epoch
  uint64_t meter_every = 0;           // steps between two measurements of the error; 0: once per epoch
  bool check = false;                 // compare a hash of the weights of all workers at every step
  double timeout = 600;               // seconds to wait for a worker before the run fails
  std::optional<ServerPlace> server;  // instead of an engine
};

// The learning rate of one step. An epoch has `epoch` steps and the run has `total`.
double rate_at(const Settings& settings, uint64_t step, uint64_t epoch, uint64_t total);

}  // namespace gradwire::train
