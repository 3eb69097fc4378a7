// SPDX-License-Identifier: Apache-2.0
// The record of one run, checked field by field. A loss, an error or a cosine that is not a number is null in JSON and
// NaN here, because a run that diverged is a result. Every other field must exist, have its type and be in its range.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace gradwire::app {

// Since the start of the run. Compute, encode and decode are processor time of one worker, as a mean over workers.
struct RunSeconds {
  double wall = 0, compute = 0, encode = 0, wait = 0, decode = 0;
};

struct Epoch {
  uint64_t epoch = 0, step = 0;  // steps since the start
  double rate = 0, train_loss = 0, train_accuracy = 0, test_loss = 0, test_accuracy = 0;
  double bytes_sent = 0;  // since the start, by one worker, mean over workers
  double bits = 0;        // per element sent up, mean of this epoch
  RunSeconds seconds;
};

// The model on the test set before its epoch had ended.
struct Evaluation {
  double epoch = 0;  // with a fraction
  uint64_t step = 0;
  double test_loss = 0, test_accuracy = 0;
  double bytes_sent = 0;  // as in Epoch
  RunSeconds seconds;
};

struct TensorError {
  std::string name;
  uint64_t elements = 0;
  double error = 0;   // ||exact mean - result||^2 / ||exact mean||^2
  double cosine = 0;  // between the exact mean and the result
};

struct Measurement {
  uint64_t step = 0;
  std::vector<TensorError> tensors;
};

struct LearnedTable {  // what a codec had fitted at a step
  uint64_t step = 0;
  std::string direction, codec;  // direction: up or down
  std::vector<std::string> tensors, lines;
  std::vector<double> levels;
};

struct RunMemory {
  double peak = 0, gradients = 0, residuals = 0, messages = 0;  // bytes
};

enum class Metric { accuracy, loss, perplexity };

struct Run {
  std::string codec, canonical, task, model, collective, device, machine, engine, optimizer, schedule, weights, command;
  std::string version, commit, date, host;  // of the program that made it; empty in older records
  uint64_t seed = 0, workers = 0, batch = 0, parameters = 0, skipped_steps = 0;
  double rate = 0;
  bool finished = false;
  Metric metric = Metric::accuracy;
  std::vector<Epoch> epochs;
  std::vector<Evaluation> points;  // between the ends of epochs
  std::vector<std::pair<uint64_t, double>> bits_over_time;
  std::vector<Measurement> layers;
  std::vector<LearnedTable> tables;
  RunMemory memory;
};

Run parse_run(const nlohmann::json& record);

const char* name_of(Metric metric);
double value_of(const Epoch& epoch, Metric metric);
double value_of(const Evaluation& point, Metric metric);

// fp32 bytes / bytes sent, where the fp32 bytes are those that a worker sends without compression in as many steps with
// the same collective. NaN if nothing was sent.
double ratio_of(const Run& run);

}  // namespace gradwire::app
