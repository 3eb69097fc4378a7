// SPDX-License-Identifier: Apache-2.0
#include "train/worker.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <torch/autograd.h>
#include <torch/nn/functional/loss.h>

#include <chrono>
#include <cmath>

#include "core/bits.h"
#include "core/clock.h"
#include "gradwire/error.h"

namespace gradwire::train {
namespace {

// The model computes in half precision inside this scope.
class Autocast {
 public:
  explicit Autocast(const std::string& precision) : on_(precision != "fp32") {
    if (!on_) return;
    at::autocast::set_autocast_dtype(at::kCUDA, precision == "bf16" ? at::kBFloat16 : at::kHalf);
    at::autocast::set_autocast_enabled(at::kCUDA, true);
  }
  ~Autocast() {
    if (!on_) return;
    at::autocast::set_autocast_enabled(at::kCUDA, false);
    at::autocast::clear_cache();
  }

 private:
  bool on_;
};

// Threads share one GPU; processes have one each, as far as there are enough.
torch::Device device_of(const Settings& settings, const Engine& engine) {
  if (settings.device != "cuda") return torch::kCPU;
  return {torch::kCUDA,
          static_cast<c10::DeviceIndex>(engine.name() == "mpi" ? engine.rank() % std::max(1, cuda_devices()) : 0)};
}

}  // namespace

void LossScale::fine() {
  if (moves && ++good == 2000) {
    value *= 2;
    good = 0;
  }
}

void LossScale::overflowed() {
  if (moves) value = std::max(1.0, value / 2);
  good = 0;
}

Worker::Worker(Engine& engine, const TrainingJob& job)
    : engine_(engine),
      job_(job),
      settings_(job.settings),
      control_(engine, std::chrono::milliseconds(static_cast<int64_t>(1000 * job.places.timeout))),
      device_(device_of(settings_, engine)),
      batches_(job.task, settings_, engine.rank(), device_) {
  rank_ = engine_.rank();
  engine_.set_timeout(std::chrono::milliseconds(static_cast<int64_t>(1000 * job.places.timeout)));
  if (device_.is_cuda()) stream_ = c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_);
  const c10::OptionalStreamGuard guard(stream_);
  noise_ = std::make_shared<Noise>(device_);
  model_ = make_model({.spec = settings_.model, .dropout = settings_.dropout, .seed = settings_.seed}, job.task, noise_,
                      device_);
  std::vector<NamedParameter> named;
  for (const auto& item : model_->named_parameters()) named.push_back({item.key(), item.value()});
  std::vector<NamedParameter> kept;
  for (const auto& item : model_->named_buffers())
    if (item.value().scalar_type() == torch::kFloat32) kept.push_back({item.key(), item.value()});
  total_ = settings_.total_steps(job.task.train.count);
  descent_ = make_descent({.engine = engine_,
                           .control = control_,
                           .settings = settings_,
                           .steps = total_,
                           .timeout = job.places.timeout,
                           .parameters = named,
                           .stream = stream_,
                           .codec_device = codec_device(),
                           .server = job.places.server ? &*job.places.server : nullptr,
                           .buffers = kept});
  if (!job.places.export_to.empty())
    control_.together([&] {
      if (control_.rank() == 0) expect_writable(job.places.export_to);  // better now than after hours of training
    });
  if (!job.places.checkpoint.empty()) checkpoints_ = std::make_unique<Checkpoints>(job.places.checkpoint, control_);
  if (settings_.precision == "fp16") scale_ = {.value = 65536, .good = 0, .moves = true};
  epochs_ = points_ = bits_ = layers_ = nlohmann::json::array();
}

Device Worker::codec_device() const {
  return device_.is_cuda() ? Device{.kind = Device::Kind::cuda, .index = device_.index()} : Device{};
}

nlohmann::json Worker::train() {
  const c10::OptionalStreamGuard guard(stream_);
  begin_or_resume();
  const uint64_t per_epoch = batches_.steps_per_epoch();
  while (step_ < total_ && !stopping_) {
    const uint64_t before = step_;
    step();
    const std::vector<StepStats> all = control_.gather(step_stats());
    if (job_.places.check) {
      std::vector<uint64_t> hashes;
      for (const StepStats& one : all) hashes.push_back(one.weights);
      compare_weights(hashes);
    }
    stopping_ = std::any_of(all.begin(), all.end(), [](const StepStats& one) { return one.stop; });
    tell_step(all);
    const bool epoch_ends = step_ / per_epoch != before / per_epoch || step_ >= total_;
    if (epoch_ends) end_epoch();
    const uint64_t every = job_.places.evaluate_every;
    if (every > 0 && step_ / every != before / every && !epoch_ends) evaluate_between();
    const bool due = job_.places.save_every > 0 ? step_ % job_.places.save_every == 0 : epoch_ends;
    if (due || stopping_ || step_ >= total_) save();
  }
  const nlohmann::json left = descent_->end();
  compare_weights(control_.gather(weights_hash()));
  if (!job_.places.export_to.empty() && step_ >= total_)
    control_.together([&] {
      TensorMap state = parameters();
      state.merge(buffers());
      if (control_.rank() == 0) save_tensors(job_.places.export_to, state);
    });
  nlohmann::json whole = record();
  if (!left.is_null()) whole["server"] = left;
  return whole;
}

// One step: gradients of this worker's samples, then the same step on all workers.
void Worker::step() {
  const double rate = rate_at(settings_, step_, batches_.steps_per_epoch(), total_);
  const uint64_t meter = job_.places.meter_every > 0 ? job_.places.meter_every : batches_.steps_per_epoch();
  const bool metered = settings_.optimizer != "qadam" && !job_.places.server &&
                       ((step_ + 1) % meter == 0 || (job_.places.meter_every == 0 && step_ + 1 == total_));
  const double wall = clock_seconds(), processor = clock_seconds(TimerClock::thread_cpu), waited = seconds_.wait;

  for (torch::Tensor& parameter : model_->parameters()) parameter.mutable_grad().reset();
  std::vector<Score> scores;  // read when the GPU has nothing left to do
  for (int pass = 0; pass < settings_.accumulate; ++pass) {
    const Batch batch = batches_.training(step_, pass);
    noise_->begin(mix64(mix64(settings_.seed ^ mix64(step_)) ^
                        (static_cast<uint64_t>(pass) << 32 | static_cast<uint64_t>(rank_))));
    const Score score = score_of(batch);
    scores.push_back(score);
    if (pass + 1 == settings_.accumulate) descent_->begin({step_, rate, scale_.value, metered});
    (score.loss * (scale_.value / settings_.accumulate)).backward();
  }
  const auto report = [&] {
    EpochSums mine;
    for (const Score& score : scores) add(mine, score);
    sums_ += mine;
    return Report{.loss = mine.mean_loss(), .samples = mine.labels, .rate = rate};
  };
  const StepResult result =
      descent_->finish(report, [&](const auto& exact, const auto& got) { measure_layers(exact, got); });
  if (result.applied) {
    scale_.fine();
  } else {
    scale_.overflowed();
    ++skipped_;
  }

  // The processor time of a worker that is one thread is what the step would take on a core of its own, however many
  // workers share this machine.
  const bool own_thread = device_.is_cpu() && at::get_num_threads() == 1;
  const ExchangeStats stats = descent_->stats();
  const double passed = clock_seconds() - wall;
  seconds_.wait = stats.waited;
  seconds_.wall += passed;
  seconds_.compute +=
      own_thread ? clock_seconds(TimerClock::thread_cpu) - processor : passed - (seconds_.wait - waited);
  seconds_.codec = stats.times;
  bits_sum_ += stats.bits;
  if (bits_.empty() || bits_.back()[1] != stats.bits || step_ + 1 == total_) bits_.push_back({step_, stats.bits});
  step_ = result.next;
}

Worker::Score Worker::score_of(const Batch& batch) {
  torch::Tensor logits;
  {
    const Autocast autocast(settings_.precision);
    logits = model_->forward(batch.inputs);
  }
  logits = logits.to(torch::kFloat32);
  return {.loss = torch::nn::functional::cross_entropy(logits, batch.labels),
          .right = (logits.detach().argmax(1) == batch.labels).sum(),
          .labels = static_cast<uint64_t>(batch.labels.numel())};
}

void Worker::add(EpochSums& sums, const Score& score) {
  sums.loss += score.loss.item<double>() * static_cast<double>(score.labels);
  sums.labels += score.labels;
  sums.right += static_cast<uint64_t>(score.right.item<int64_t>());
}

void Worker::measure_layers(const std::vector<torch::Tensor>& exact, const std::vector<torch::Tensor>& got) {
  torch::NoGradGuard no_grad;
  nlohmann::json tensors = nlohmann::json::array();
  size_t i = 0;
  for (const auto& item : model_->named_parameters()) {
    const torch::Tensor truth = exact[i].to(torch::kDouble), result = got[i].to(torch::kDouble);
    ++i;
    const double size = truth.square().sum().item<double>(), length = result.square().sum().item<double>();
    const double error = (truth - result).square().sum().item<double>(),
                 product = (truth * result).sum().item<double>();
    tensors.push_back({{"name", item.key()},
                       {"elements", item.value().numel()},
                       {"error", number(size > 0 ? error / size : NAN)},
                       {"cosine", number(size > 0 && length > 0 ? product / std::sqrt(size * length) : NAN)}});
  }
  layers_.push_back({{"step", step_ + 1}, {"tensors", tensors}});
  nlohmann::json event = layers_.back();
  event["event"] = "layers";
  tell(event);
}

// The test samples are divided among the workers; all of them use the buffers of rank 0.
std::pair<double, double> Worker::evaluate() {
  torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> own;
  for (torch::Tensor& buffer : model_->buffers()) {
    own.push_back(buffer.clone());
    torch::Tensor shared = buffer.to(torch::kCPU).contiguous();
    control_.broadcast({static_cast<std::byte*>(shared.data_ptr()), shared.nbytes()});
    buffer.copy_(shared);
  }
  model_->eval();
  EpochSums mine;
  for (const auto& [first, count] : batches_.test_ranges()) add(mine, score_of(batches_.test(first, count)));
  model_->train();
  size_t k = 0;
  for (torch::Tensor& buffer : model_->buffers()) buffer.copy_(own[k++]);
  EpochSums all;
  for (const EpochSums& one : control_.gather(mine)) all += one;
  return {all.mean_loss(), all.accuracy()};
}

void Worker::evaluate_between() {
  if (!descent_->membership().leads) return;
  const auto [test_loss, test_accuracy] = evaluate();
  Seconds spent;
  double bytes = 0;
  const std::vector<StepStats> all = control_.gather(step_stats());
  for (const StepStats& one : all) {
    spent += one.seconds;
    bytes += static_cast<double>(one.bytes_sent);
  }
  const double workers = static_cast<double>(all.size());
  points_.push_back({{"epoch", static_cast<double>(step_) / static_cast<double>(batches_.steps_per_epoch())},
                     {"step", step_},
                     {"test_loss", number(test_loss)},
                     {"test_accuracy", number(test_accuracy)},
                     {"bytes_sent", bytes / workers},
                     {"seconds", spent.mean(workers)}});
  nlohmann::json event = points_.back();
  event["event"] = "evaluated";
  tell(event);
}

void Worker::end_epoch() {
  const auto [test_loss, test_accuracy] =
      descent_->membership().leads ? evaluate() : std::pair<double, double>(NAN, NAN);
  EpochSums trained;
  Seconds spent;
  double bytes = 0;
  const std::vector<StepStats> all = control_.gather(step_stats());
  for (const StepStats& one : all) {
    trained += one.sums;
    spent += one.seconds;
    bytes += static_cast<double>(one.bytes_sent);
  }
  const double workers = static_cast<double>(all.size());
  const uint64_t per_epoch = batches_.steps_per_epoch(), steps = (step_ - 1) % per_epoch + 1;
  epochs_.push_back({{"epoch", (step_ - 1) / per_epoch + 1},
                     {"step", step_},
                     {"rate", rate_at(settings_, step_ - 1, per_epoch, total_)},
                     {"train_loss", number(trained.mean_loss())},
                     {"train_accuracy", trained.accuracy()},
                     {"test_loss", number(test_loss)},
                     {"test_accuracy", number(test_accuracy)},
                     {"bytes_sent", bytes / workers},
                     {"bits", job_.places.server ? descent_->stats().bits : bits_sum_ / static_cast<double>(steps)},
                     {"seconds", spent.mean(workers)}});
  sums_ = {};
  bits_sum_ = 0;
  nlohmann::json event = epochs_.back();
  event["event"] = "epoch";
  event["skipped_steps"] = skipped_;
  tell(event);
}

}  // namespace gradwire::train
