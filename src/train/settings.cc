// SPDX-License-Identifier: Apache-2.0
#include "train/settings.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <sstream>

#include "collective/factor_plan.h"
#include "collective/feedback_rule.h"
#include "gradwire/error.h"

namespace gradwire::train {
namespace {

// Where momenta are exchanged. Few bits are saved on small tensors, and rounding them costs much.
constexpr const char* kSmallTensors = "1d=fp32;<1024=fp32";
constexpr const char* kFirstCodec = "qsgd:bits=4";
constexpr const char* kMomentaDown = "optquant:bits=4";

// Workers that exchange momenta and have not chosen: also codecs whose traits say `momentum` have feedback.
ReduceOptions::Feedback for_momenta(ReduceOptions::Feedback choice) {
  using Feedback = ReduceOptions::Feedback;
  return choice == Feedback::codec ? Feedback::momentum : choice;
}

void refuse(const char* field, const std::string& value, const std::string& allowed) {
  throw Error(ErrorKind::usage, fmt::format("{} is {}; allowed is {}", field, value, allowed), field);
}

void check_choice(const char* field, const std::string& value, std::initializer_list<const char*> allowed) {
  if (std::find(allowed.begin(), allowed.end(), value) == allowed.end())
    refuse(field, "'" + value + "'", fmt::format("{}", fmt::join(allowed, ", ")));
}

void check_range(const char* field, double value, double least, double most) {
  if (!(value >= least && value <= most)) refuse(field, fmt::format("{}", value), fmt::format("{} to {}", least, most));
}

}  // namespace

TaskOptions Settings::task_options(const std::string& directory) const {
  return {.directory = directory, .length = length, .vocabulary = vocabulary, .words = words, .limit = limit};
}

bool Settings::keeps_residuals() const {
  return is_lowrank(codec) || wants_residual(Codec::parse(codec), feedback_rule());
}

bool Settings::exchanges_momenta() const {
  if (exchange != "auto") return exchange == "momenta";
  if (optimizer != "adam" && optimizer != "adamw") return false;
  if (is_lowrank(codec)) return false;  // a momentum in units of the update is described less well by few directions
  return wants_residual(Codec::parse(codec), for_momenta(parse_feedback(feedback)));
}

ReduceOptions::Feedback Settings::feedback_rule() const {
  const ReduceOptions::Feedback choice = parse_feedback(feedback);
  return exchanges_momenta() ? for_momenta(choice) : choice;
}

FirstSteps Settings::first_steps_of(uint64_t steps) const {
  if (!exchanges_momenta()) return {};
  const uint64_t count = first_steps < 0 ? steps / 10 : static_cast<uint64_t>(first_steps);
  return {
      .steps = count, .up = with_rules(kFirstCodec), .down = collective == "scatter" ? with_rules(kFirstCodec) : ""};
}

std::string Settings::with_rules(const std::string& last) const {
  const std::string all = rules.empty() && exchanges_momenta() ? kSmallTensors : rules;
  bool all_alike = true;  // then they say nothing: fp32 with 1d=fp32 is fp32, and compares as such
  std::istringstream list(all);
  for (std::string rule; std::getline(list, rule, ';');)
    all_alike = all_alike && (rule.empty() || rule.substr(rule.find('=') + 1) == last);
  if (all_alike) return last;
  return fmt::format("{}{}*={}", all, all.ends_with(';') ? "" : ";", last);
}

std::string Settings::up() const { return with_rules(codec); }

std::string Settings::label() const { return rules.empty() ? codec : up(); }

std::string Settings::extras() const {
  const bool descends = optimizer == "qadam" && send == "weights";  // then weights are compressed however updates are
  if (up() == "fp32") return descends && down != "fp32" ? ", down " + down : "";  // it has neither of the others
  return std::string(exchanges_momenta() ? ", momenta" : "") + (feedback == "codec" ? "" : ", feedback " + feedback) +
         (residual == "f32" ? "" : ", residuals " + residual) + (decay == 1 ? "" : fmt::format(", decay {}", decay)) +
         (down.empty() ? "" : ", down " + down);
}

ReduceOptions Settings::reduce_options() const {
  ReduceOptions options;
  options.method = collective == "gather" ? ReduceOptions::Method::gather : ReduceOptions::Method::scatter;
  options.up = up();
  options.down = down;
  if (down.empty() && exchanges_momenta() && collective == "scatter") options.down = with_rules(kMomentaDown);
  options.feedback = feedback_rule();
  options.owner_feedback = owner_feedback_for(options.feedback);
  options.residual = parse_dtype(residual);
  options.decay = static_cast<float>(decay);
  options.seed = seed;
  return options;
}

AdamOptions Settings::adam_options() const { return {.weight_decay = weight_decay, .decoupled = optimizer == "adamw"}; }

QAdamOptions Settings::qadam_options() const {
  return {.beta = beta,
          .theta = theta,
          .correction = correction,
          .theory = schedule == "theory",
          .shared = moments == "shared",
          .share_every = share_every};
}

// What qadam alone has, and what it has not.
void Settings::check_qadam() const {
  check_choice("moments", moments, {"local", "shared"});
  check_choice("send", send, {"weights", "updates"});
  check_range("beta", beta, 0, 0.9999999);
  check_range("theta", theta, 1e-7, 0.9999999);
  check_range("share-every", static_cast<double>(share_every), 1, 1e9);
  if (optimizer != "qadam") {
    const Settings usual;
    const auto only = [](const char* field, bool given) {
      if (given) refuse(field, "given", "only --optimizer qadam");
    };
    only("beta", beta != usual.beta);
    only("theta", theta != usual.theta);
    only("correction", correction != usual.correction);
    only("moments", moments != usual.moments);
    only("share-every", share_every != usual.share_every);
    only("send", send != usual.send);
    if (schedule == "theory") refuse("schedule", "'theory'", "only --optimizer qadam, whose theory it is");
    return;
  }
  const char* implied = send == "weights" ? "gather" : "scatter";
  if (collective != implied)
    refuse("collective", fmt::format("'{}' with --send {}", collective, send), fmt::format("{} there", implied));
  if (send == "weights" && down.empty())
    refuse("down", "empty with --send weights", "a codec of the weights, e.g. unigrid:bits=8 or fp32");
  if (moments == "local" && share_every != Settings().share_every)
    refuse("share-every", "given", "only --moments shared");
}

void Settings::check_exchange() const {
  check_choice("exchange", exchange, {"auto", "gradients", "momenta"});
  check_range("first-steps", static_cast<double>(first_steps), -1, 1e15);
  if (exchange == "momenta" && optimizer == "qadam")
    refuse("exchange", "'momenta' with --optimizer qadam", "sgd, adam or adamw there; qadam exchanges updates");
  if (first_steps >= 0 && !exchanges_momenta()) refuse("first-steps", "given", "only where momenta are exchanged");
}

void Settings::check_decay() const {
  if (!(decay > 0 && decay <= 1)) refuse("decay", fmt::format("{}", decay), "above 0, to 1");
  if (decay != 1 && !keeps_residuals())
    refuse("decay", fmt::format("{} with {}, which keeps no residuals", decay, codec),
           "a codec with error feedback, or --feedback on");
}

uint64_t Settings::steps_per_epoch(uint64_t samples) const {
  return samples / (static_cast<uint64_t>(batch) * static_cast<uint64_t>(accumulate) * static_cast<uint64_t>(workers));
}

uint64_t Settings::total_steps(uint64_t samples) const {
  const uint64_t all = steps_per_epoch(samples) * static_cast<uint64_t>(epochs);
  return steps == 0 ? all : std::min(all, steps);
}

void Settings::check() const {
  check_choice("device", device, {"cpu", "cuda"});
  check_choice("precision", precision, {"fp32", "bf16", "fp16"});
  check_choice("collective", collective, {"gather", "scatter"});
  check_choice("feedback", feedback, {"codec", "on", "off"});
  check_choice("residual", residual, {"f32", "bf16"});
  check_choice("optimizer", optimizer, {"sgd", "adam", "adamw", "qadam"});
  check_choice("schedule", schedule, {"constant", "step", "cosine", "theory"});
  check_range("workers", workers, 1, 1024);
  check_range("epochs", epochs, 1, 1e6);
  check_range("batch", batch, 1, 1e6);
  check_range("accumulate", accumulate, 1, 1e4);
  check_range("threads", threads, 0, 1024);
  check_range("bucket-mb", bucket_mb, 0.001, 1e5);
  check_range("rate", rate, 0, 1e6);
  check_range("momentum", momentum, 0, 1);
  check_range("weight-decay", weight_decay, 0, 1e3);
  check_range("clip", clip, 0, 1e30);
  check_range("warmup", warmup, 0, epochs);
  check_range("drop", drop, 0, 1);
  check_range("dropout", dropout, 0, 0.99);
  for (double epoch : drop_at) check_range("drop-at", epoch, 0, 1e6);
  if (precision != "fp32" && device == "cpu")
    refuse("precision", precision + " on the CPU", "fp32 there; bf16 and fp16 need --device cuda");
  if (schedule == "step" && drop_at.empty()) refuse("drop-at", "empty", "at least one epoch with --schedule step");
  if (schedule != "step" && !drop_at.empty()) refuse("drop-at", "given", "only --schedule step");
  check_qadam();
  check_exchange();
  check_decay();
  if (collective == "gather" && !down.empty() && optimizer != "qadam")
    refuse("down", "'" + down + "'", "only --collective scatter, which sends means down");
  canonical_rules(up());
  if (!down.empty()) Rules::parse(down);
}

double rate_at(const Settings& settings, uint64_t step, uint64_t epoch, uint64_t total) {
  const double warm = settings.warmup * static_cast<double>(epoch), at = static_cast<double>(step);
  if (at < warm) return settings.rate * (at + 1) / warm;
  if (settings.schedule == "cosine") {
    const double left = std::max(1.0, static_cast<double>(total) - warm);
    return settings.rate * 0.5 * (1 + std::cos(std::numbers::pi * (at - warm) / left));
  }
  if (settings.schedule == "theory") return settings.rate / std::sqrt(at + 1);
  double rate = settings.rate;
  for (double drop : settings.drop_at)
    if (at >= drop * static_cast<double>(epoch)) rate *= settings.drop;
  return rate;
}

}  // namespace gradwire::train
