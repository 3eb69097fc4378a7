// SPDX-License-Identifier: Apache-2.0
// The record of one run, checked field by field. A loss, an error or a cosine that is not a number stands as null in
// JSON and as NaN here: a run that diverged is a result. Everything else must be there, of its type and in its range.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace gradwire::app {

struct Seconds {  // since the start of the run; compute, encode, decode: processor time of one worker, mean over
                  // workers
  double wall = 0, compute = 0, encode = 0, wait = 0, decode = 0;
};

struct Epoch {
  uint64_t epoch = 0, step = 0;  // steps since the start
  double rate = 0, train_loss = 0, train_accuracy = 0, test_loss = 0, test_accuracy = 0;
  double bytes_sent = 0;  // since the start, by one worker, mean over workers
  double bits = 0;        // per element sent up, mean of this epoch
  Seconds seconds;
};

struct TensorError {
  std::string name;
  uint64_t elements = 0;
  double error = 0;   // |exact mean - result|^2 / |exact mean|^2
  double cosine = 0;  // between the two
};

struct Measurement {
  uint64_t step = 0;
  std::vector<TensorError> tensors;
};

struct Learned {  // what a codec had fitted at a step
  uint64_t step = 0;
  std::string side, codec;
  std::vector<std::string> tensors, lines;
  std::vector<double> levels;
};

struct Memory {
  double peak = 0, gradients = 0, residuals = 0, messages = 0;  // bytes
};

enum class Metric { accuracy, loss, perplexity };

struct Run {
  std::string codec, canonical, task, model, collective, device, machine, engine, optimizer, schedule, weights, command;
  uint64_t seed = 0, workers = 0, batch = 0, parameters = 0, skipped_steps = 0;
  double rate = 0;
  bool finished = false;
  Metric metric = Metric::accuracy;
  std::vector<Epoch> epochs;
  std::vector<std::pair<uint64_t, double>> bits_over_time;
  std::vector<Measurement> layers;
  std::vector<Learned> tables;
  Memory memory;
};

Run parse_run(const nlohmann::json& record);

const char* name_of(Metric metric);
double value_of(const Epoch& epoch, Metric metric);

}  // namespace gradwire::app
