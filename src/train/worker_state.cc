// SPDX-License-Identifier: Apache-2.0
// A worker's checkpoints, its events, and the record at the end: see worker.h.
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "collective/factor_plan.h"
#include "collective/timer.h"
#include "gradwire/error.h"
#include "train/worker.h"

namespace gradwire::train {
namespace {

TensorMap joined(TensorMap some, TensorMap others) {
  some.merge(others);
  return some;
}

double number_of(const nlohmann::json& value) { return value.is_null() ? NAN : value.get<double>(); }

}  // namespace

// JSON has no NaN.
nlohmann::json number(double value) { return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(nullptr); }

Worker::EpochSums& Worker::EpochSums::operator+=(const EpochSums& other) {
  loss += other.loss;
  labels += other.labels;
  right += other.right;
  return *this;
}

double Worker::EpochSums::mean_loss() const { return loss / static_cast<double>(std::max<uint64_t>(1, labels)); }
double Worker::EpochSums::accuracy() const {
  return static_cast<double>(right) / static_cast<double>(std::max<uint64_t>(1, labels));
}

Worker::Seconds& Worker::Seconds::operator+=(const Seconds& other) {
  wall += other.wall;
  compute += other.compute;
  wait += other.wait;
  codec += other.codec;
  return *this;
}

nlohmann::json Worker::Seconds::mean(double workers) const {
  return {{"wall", wall / workers},
          {"compute", compute / workers},
          {"encode", codec.encode / workers},
          {"wait", wait / workers},
          {"decode", codec.decode / workers}};
}

Worker::StepStats Worker::step_stats() const {
  Seconds all = seconds_before_;
  all += seconds_;
  return {.sums = sums_,
          .seconds = all,
          .bytes_sent = descent_->stats().bytes_sent + sent_before_,
          .weights = job_.places.check ? weights_hash() : 0,
          .stop = job_.stop.load()};
}

uint64_t Worker::weights_hash() const {
  uint64_t hash = 0;
  for (const torch::Tensor& parameter : model_->parameters()) {
    const torch::Tensor values = parameter.detach().to(torch::kCPU).contiguous();
    hash = XXH3_64bits_withSeed(values.data_ptr(), values.nbytes(), hash);
  }
  return hash;
}

void Worker::compare_weights(const std::vector<uint64_t>& hashes) const {
  for (size_t rank = 1; rank < hashes.size(); ++rank)
    if (hashes[rank] != hashes[0])
      throw Error(ErrorKind::mismatch,
                  fmt::format("after step {} worker {} holds other weights than worker 0", step_, rank), "weights",
                  static_cast<int>(rank));
}

// The rank of a worker that joins a server comes from the server.
void Worker::take_rank() {
  if (const std::optional<uint32_t> rank = descent_->membership().rank) {
    rank_ = static_cast<int>(*rank);
    batches_.take_rank(*rank);
  }
}

// Other settings are refused by name.
void Worker::resume(uint64_t step) {
  const nlohmann::json state = checkpoints_->state(step);
  const nlohmann::json now = settings_, then = state.at("settings");
  for (const auto& [name, value] : now.items())
    if (!then.contains(name) || then[name] != value)
      throw Error(ErrorKind::usage,
                  fmt::format("{} was saved with {} = {}; this run has {}: resume with the same settings",
                              job_.places.checkpoint, name, then.value(name, nlohmann::json()).dump(), value.dump()),
                  name);
  const DescentState kept = descent_->state();
  checkpoints_->load(step, joined(parameters(), kept.shared), joined(buffers(), kept.own), *descent_);
  descent_->restore(kept);
  step_ = saved_.emplace(step);
  for (const nlohmann::json& one : state.at("workers")) {
    told_.loss += number_of(one.at("loss"));
    told_.labels += one.at("labels").get<uint64_t>();
  }
  const nlohmann::json& mine = state.at("workers").at(static_cast<size_t>(control_.rank()));
  sums_ = {number_of(mine.at("loss")), mine.at("labels"), mine.at("right")};
  sent_before_ = mine.at("bytes_sent");
  seconds_before_ = {mine.at("wall"), mine.at("compute"), mine.at("wait"), {mine.at("encode"), 0, mine.at("decode")}};
  skipped_ = state.at("skipped");
  scale_.value = state.at("loss_scale");
  scale_.good = state.at("good_steps");
  bits_sum_ = state.at("bits_sum");
  epochs_ = state.at("epochs");
  points_ = state.value("points", nlohmann::json::array());  // a checkpoint of an older version has none
  bits_ = state.at("bits_over_time");
  layers_ = state.at("layers");
}

void Worker::begin_or_resume() {
  const bool may_resume = job_.places.resume || job_.places.resume_previous;
  const std::optional<uint64_t> newest = checkpoints_ ? checkpoints_->newest() : std::nullopt;
  if (newest && !may_resume)
    throw Error(
        ErrorKind::usage,
        fmt::format("{} holds a checkpoint of step {}: add --resume to go on from it, or name another directory",
                    job_.places.checkpoint, *newest),
        "checkpoint");
  if (newest) {
    const std::string problem = checkpoints_->damage(*newest);
    const std::optional<uint64_t> older = problem.empty() ? std::nullopt : checkpoints_->whole_before(*newest);
    if (!problem.empty() && !(older && job_.places.resume_previous))
      throw Error(ErrorKind::frame,
                  fmt::format("{} ({})", problem,
                              older ? fmt::format("the checkpoint of step {} is whole: --resume-previous sets the "
                                                  "damaged one aside and goes on from there",
                                                  *older)
                                    : "no older checkpoint is whole"),
                  "checkpoint");
    resume(older.value_or(*newest));
    if (older) set_aside_ = {{"step", *newest}, {"why", problem}, {"path", checkpoints_->set_aside(*newest)}};
  } else {
    step_ = descent_->start();
    take_rank();
  }
  compare_weights(control_.gather(weights_hash()));
  nlohmann::json event = settings_;
  event["event"] = "start";
  event["exchange"] = settings_.optimizer == "qadam"  ? "updates"
                      : settings_.exchanges_momenta() ? "momenta"
                                                      : "gradients";
  event["parameters"] = elements();
  event["buckets"] = descent_->stats().buckets;
  event["total_steps"] = total_;
  event["steps_per_epoch"] = batches_.steps_per_epoch();
  event["first_step"] = step_;
  event["epochs_done"] = epochs_;
  if (!set_aside_.is_null()) event["set_aside"] = set_aside_;
  tell(event);
}

void Worker::save() {
  if (!checkpoints_ || saved_ == step_) return;
  nlohmann::json workers = nlohmann::json::array();
  for (const StepStats& one : control_.gather(step_stats()))
    workers.push_back({{"loss", number(one.sums.loss)},
                       {"labels", one.sums.labels},
                       {"right", one.sums.right},
                       {"bytes_sent", one.bytes_sent},
                       {"wall", one.seconds.wall},
                       {"compute", one.seconds.compute},
                       {"wait", one.seconds.wait},
                       {"encode", one.seconds.codec.encode},
                       {"decode", one.seconds.codec.decode}});
  const nlohmann::json state = {{"settings", settings_},      {"step", step_},
                                {"workers", workers},         {"skipped", skipped_},
                                {"loss_scale", scale_.value}, {"good_steps", scale_.good},
                                {"bits_sum", bits_sum_},      {"epochs", epochs_},
                                {"points", points_},          {"bits_over_time", bits_},
                                {"layers", layers_}};
  const DescentState kept = descent_->state();
  checkpoints_->save(step_, state, joined(parameters(), kept.shared), joined(buffers(), kept.own), *descent_);
  saved_ = step_;
  tell({{"event", "saved"}, {"step", step_}, {"directory", job_.places.checkpoint}});
}

uint64_t Worker::elements() const {
  uint64_t count = 0;
  for (const torch::Tensor& parameter : model_->parameters()) count += static_cast<uint64_t>(parameter.numel());
  return count;
}

TensorMap Worker::parameters() const {
  TensorMap all;
  for (const auto& item : model_->named_parameters()) all[item.key()] = item.value();
  return all;
}

TensorMap Worker::buffers() const {
  TensorMap all;
  for (const auto& item : model_->named_buffers()) all[item.key()] = item.value();
  return all;
}

nlohmann::json Worker::learned() const {
  nlohmann::json list = nlohmann::json::array();
  for (const Exchange::Learned& one : descent_->learned()) {
    nlohmann::json entry = {{"step", step_},
                            {"side", one.direction == Direction::up ? "up" : "down"},
                            {"codec", one.codec.str()},
                            {"tensors", one.tensors},
                            {"lines", one.codec.describe()}};
    for (const std::string& line : one.codec.describe()) {
      std::istringstream words(line);
      std::string first;
      if (!(words >> first) || first != "levels:") continue;
      for (double level; words >> level;) entry["levels"].push_back(level);
    }
    list.push_back(entry);
  }
  return list;
}

nlohmann::json Worker::record() const {
  const ReduceMemory held = descent_->stats().memory;
  return {{"version", 1},
          {"codec", settings_.label() + settings_.extras()},
          {"canonical", canonical_rules(settings_.up()) + settings_.extras()},
          {"seed", settings_.seed},
          {"task", settings_.task},
          {"model", settings_.model},
          {"workers", settings_.workers},
          {"collective", settings_.collective},
          {"device", settings_.device},
          {"engine", job_.places.server ? "server" : engine_.name()},
          {"batch", settings_.batch},
          {"optimizer", settings_.optimizer},
          {"rate", settings_.rate},
          {"schedule", settings_.schedule},
          {"parameters", elements()},
          {"finished", step_ >= total_},
          {"failed", 2 * skipped_ > step_},  // its weights are not what was asked for
          {"steps", step_},
          {"weights", fmt::format("{:016x}", weights_hash())},
          {"skipped_steps", skipped_},
          {"metric", "accuracy"},
          {"epochs", epochs_},
          {"points", points_},
          {"bits_over_time", bits_},
          {"layers", layers_},
          {"tables", learned()},
          {"memory",
           {{"gradients", 4 * elements()},
            {"residuals", held.residuals},
            {"messages", held.messages},
            {"sums", held.sums}}},
          {"settings", settings_}};
}

void Worker::tell(nlohmann::json event) const {
  if (control_.rank() == 0 && job_.listener) job_.listener(event);
}

void Worker::tell_step(const std::vector<StepStats>& all) {
  if (control_.rank() != 0 || !job_.listener) return;
  EpochSums sums;
  double bytes = 0;
  for (const StepStats& one : all) {
    sums += one.sums;
    bytes += static_cast<double>(one.bytes_sent);
  }
  const double samples = static_cast<double>(settings_.batch) * settings_.accumulate * control_.size();
  const double each = (seconds_.wall + seconds_before_.wall) / static_cast<double>(step_);
  tell({{"event", "step"},
        {"epoch", (step_ - 1) / batches_.steps_per_epoch() + 1},
        {"step", step_},
        {"loss", number(sums.mean_loss())},
        {"step_loss",
         number((sums.loss - told_.loss) / static_cast<double>(std::max<uint64_t>(1, sums.labels - told_.labels)))},
        {"accuracy", sums.accuracy()},
        {"bits", bits_.back()[1]},
        {"bytes_sent", bytes / static_cast<double>(all.size())},
        {"samples_per_second", samples / each},
        {"seconds_left", each * static_cast<double>(total_ - std::min(step_, total_))},
        {"skipped_steps", skipped_}});
  told_ = step_ % batches_.steps_per_epoch() == 0 ? EpochSums{} : sums;
}

}  // namespace gradwire::train
