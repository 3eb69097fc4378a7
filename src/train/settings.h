// SPDX-License-Identifier: Apache-2.0
// Everything that a run of training is told. What decides its weights (Settings) is kept in checkpoints and compared
// when a run is resumed; where things go and how they are shown (Places) may differ.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "gradwire/collective.h"
#include "optim/qadam.h"
#include "server/endpoint.h"
#include "train/data.h"

namespace gradwire::train {

struct Settings {
  // What is trained, on what.
  std::string task = "fashion-mnist";
  std::string model = "cnn";
  int64_t length = 0, vocabulary = 0;  // as in TaskOptions
  bool words = false;
  uint64_t limit = 0;
  double dropout = 0;

  // Who does it.
  int workers = 4;
  std::string device = "cpu";      // or cuda
  std::string precision = "fp32";  // or bf16, fp16: what the model computes in, on CUDA
  bool deterministic = false;
  int threads = 0;  // of one worker, on the CPU; 0: the machine's cores dealt out

  // How gradients travel.
  std::string codec = "qsgd:bits=4";
  std::string rules;  // of tensors that travel otherwise: "1d=fp32;*.bias=fp32"
  std::string down;   // scatter: the codec of the means; empty: as up. qadam that sends weights: their codec
  std::string collective = "scatter";
  std::string feedback = "codec";  // or on, off
  std::string residual = "f32";    // or bf16: half the memory
  double bucket_mb = 25;           // gradients are sent in groups of about so many megabytes, last layer first

  // The descent.
  uint64_t seed = 1;
  int epochs = 5;
  uint64_t steps = 0;  // stop after so many steps; 0: after the epochs
  int batch = 64;      // samples of one worker in one backward pass
  int accumulate = 1;  // backward passes a step
  std::string optimizer = "sgd";
  double rate = 0.05, momentum = 0.9, weight_decay = 5e-4, clip = 0;
  std::string schedule = "cosine";
  double warmup = 0;            // epochs
  std::vector<double> drop_at;  // epochs
  double drop = 0.1;

  // qadam alone.
  double beta = 0.9, theta = 0.999;
  bool correction = true;         // of the bias of young moments
  std::string moments = "local";  // or shared: the second moment is pooled over workers
  uint64_t share_every = 16;      // steps
  std::string send = "weights";   // what goes down; or updates

  TaskOptions task_options(const std::string& directory) const;
  ReduceOptions reduce_options() const;
  QAdamOptions qadam_options() const;
  std::string up() const;      // rules and codec as one text
  std::string extras() const;  // what else was chosen for it, for people
  uint64_t steps_per_epoch(uint64_t samples) const;
  uint64_t total_steps(uint64_t samples) const;
  // Throws Error{usage} naming the first setting that cannot be.
  void check() const;

 private:
  void check_qadam() const;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Settings, task, model, length, vocabulary, words, limit, dropout, workers, device,
                                   precision, deterministic, threads, codec, rules, down, collective, feedback,
                                   residual, bucket_mb, seed, epochs, steps, batch, accumulate, optimizer, rate,
                                   momentum, weight_decay, clip, schedule, warmup, drop_at, drop, beta, theta,
                                   correction, moments, share_every, send)

// A parameter server, and this process as one of its workers.
struct ServerPlace {
  std::string address;  // HOST:PORT
  server::Security security;
  std::string name;         // of this worker, for people
  double patience_s = 600;  // how long a server that does not answer is tried
  uint64_t warm_steps = 0;  // that this worker only watches at first
};

struct Places {
  std::string data;                   // directory of the data set
  std::string checkpoint;             // directory; empty: nothing is saved
  bool resume = false;                // go on from the newest checkpoint there
  uint64_t save_every = 0;            // steps; 0: after each epoch
  std::string export_to;              // weights for Python's torch.load, at the end
  uint64_t meter_every = 0;           // steps between measurements of the layers' errors; 0: at the end of each epoch
  bool check = false;                 // compare a hash of the weights of all workers at every step
  double timeout = 600;               // seconds until a silent worker is given up
  std::optional<ServerPlace> server;  // instead of an engine
};

// The learning rate of a step, of `total`, of which `epoch` make an epoch.
double rate_at(const Settings& settings, uint64_t step, uint64_t epoch, uint64_t total);

}  // namespace gradwire::train
