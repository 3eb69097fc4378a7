// SPDX-License-Identifier: Apache-2.0
#include "collective/model_core.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "core/refuse.h"
#include "device/recording.h"
#include "feedback/feedback_state.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

using Kind = CoderOptions::Kind;

const char* name_of(Kind kind, bool scatter) {
  if (kind == Kind::reduce_scatter) return "reduce_scatter";
  if (kind == Kind::all_gather) return "all_gather";
  return scatter ? "scatter" : "gather";
}

// One of `parts` parts of a shard, cut where a tensor may be cut, so that no unit is in two parts.
Shard part_of(const Shard& shard, uint64_t part, uint64_t parts) {
  const uint64_t tiles = (shard.count + kTileElements - 1) / kTileElements;
  const uint64_t first = std::min(shard.count, tiles * part / parts * kTileElements),
                 end = std::min(shard.count, tiles * (part + 1) / parts * kTileElements);
  return {shard.tensor, shard.first + first, end - first, shard.owner};
}

}  // namespace

ModelCore::ModelCore(std::vector<NamedTensor> tensors, const CoderOptions& o, JobPlace place, size_t bare)
    : options(o),
      scatter(o.kind != Kind::all_reduce || o.reduce.method == ReduceOptions::Method::scatter),
      job(name_of(o.kind, scatter), tensors, o.reduce, place, bare),
      feedback(o.reduce.residual, o.reduce.device),
      up_learning(job, Direction::up, o.world),
      down_learning(job, Direction::down, o.world),
      finite(o.reduce.device) {
  if (o.world < 1 || o.rank < 0 || o.rank >= o.world)
    refuse_usage(fmt::format("rank is {} of {}; expected 0 to world - 1", o.rank, o.world), "rank");
  if (o.kind != Kind::all_reduce && o.reduce.method == ReduceOptions::Method::gather)
    refuse_usage(fmt::format("method is gather; {} has no other method than scatter", job.collective), "method");
  if (has_up() && !up_learning.empty()) learnings.push_back(&up_learning);
  if (has_down() && !down_learning.empty()) learnings.push_back(&down_learning);
  // All residuals are made at the start, so that a state holds the same names whenever it is saved.
  if (has_up()) job.add_residuals(feedback, job.whole(), Direction::up);
  if (has_down()) job.add_residuals(feedback, Job::of_owner(all_shards(), o.rank), Direction::down);
  // This follows from the rules and not from the codecs of a step: it must not change from step to step, and must be
  // the same on all ranks.
  for (size_t i = 0; i < job.tensors.size(); ++i)
    divisible.push_back(o.kind == Kind::all_reduce && scatter && job.up[i].traits().unit != 0 &&
                        job.down[i].traits().unit != 0);
  save_learned();
}

std::vector<Shard> ModelCore::all_shards() const {
  if (options.kind == Kind::all_reduce) return job.owned(options.world);
  std::vector<Shard> all = job.whole();
  for (Shard& shard : all) shard.owner = static_cast<int>(shard.tensor % static_cast<size_t>(options.world));
  return all;
}

BucketPlan ModelCore::bucket(const std::vector<size_t>& tensors, uint64_t part, uint64_t parts) const {
  if (part >= parts) refuse_usage(fmt::format("part is {} of {}", part, parts), "part");
  const std::set<size_t> distinct(tensors.begin(), tensors.end());
  if (distinct.size() != tensors.size() || (!distinct.empty() && *distinct.rbegin() >= job.tensors.size()))
    refuse_usage("the tensors of a bucket are distinct indices of the model's list", "tensors");
  BucketPlan plan;
  plan.gather = !scatter;
  plan.sums = has_down() ? ShardSums::Use::kept : ShardSums::Use::tensors;
  plan.f32_down = options.kind == Kind::all_reduce;
  std::vector<Shard> own;
  for (const Shard& shard : plan.gather ? job.whole() : all_shards())
    if (distinct.contains(shard.tensor))
      if (const Shard cut = plan.gather ? shard : part_of(shard, part, parts); cut.count > 0) own.push_back(cut);
  if (has_up()) plan.up = plan.gather ? ShardLists{own} : by_owner(own, options.world);
  if (has_down()) plan.down = by_owner(own, options.world);
  return plan;
}

void ModelCore::begin(uint64_t number, const StepOptions& options_of_step) {
  if (step) abandon();
  if (!(options_of_step.loss_scale > 0) || !std::isfinite(options_of_step.loss_scale))
    refuse_usage(fmt::format("loss_scale is {}; it must be finite and above 0", options_of_step.loss_scale),
                 "loss_scale");
  forget();
  follow_state();
  owns_step_ = !feedback.open_step();
  if (owns_step_) before_ = saved_;
  step = number;
  set_clock(options.reduce.device, number);
  how = options_of_step;
  choose(Direction::up);
  choose(Direction::down);
}

void ModelCore::choose(Direction direction) {
  const bool up = direction == Direction::up;
  std::vector<Codec>& chosen = up ? job.up : job.down;
  std::vector<Codec> codecs =
      how.exact ? std::vector<Codec>(job.tensors.size()) : (up ? up_learning : down_learning).codecs(*step, how.rate);
  if (codecs == chosen) return;
  chosen = std::move(codecs);
  ++epochs[static_cast<size_t>(direction)];
}

Learning* ModelCore::learning(Direction direction) {
  Learning& one = direction == Direction::up ? up_learning : down_learning;
  return how.exact || one.empty() ? nullptr : &one;
}

void ModelCore::end() {
  check_open("end");
  if (!how.exact && stats_bytes(learnings, *step, false) > 0) taught = step;
  unsettled_ = true;
  FeedbackAccess::store(feedback).commit_if_finite(*step, finite, options.reduce.device);
  finite.end_step(options.reduce.device);
  step.reset();
  ++ended;
}

void ModelCore::settle() {
  if (std::exchange(unsettled_, false) && taught && finite.last_bad()) forget();
}

void ModelCore::commit() {
  feedback.commit(*step);
  finite.end_step(options.reduce.device);
  step.reset();
  ++ended;
  save_learned();
}

void ModelCore::leave_open() {
  undecided = std::exchange(step, std::nullopt);
  save_learned();
}

void ModelCore::abandon() {
  if (!step) return;
  if (owns_step_) feedback.rollback(*step);
  finite.end_step(options.reduce.device);
  taught = std::exchange(step, std::nullopt);
  forget();
  if (owns_step_) unlearn();
}

void ModelCore::roll_back(uint64_t decided) {
  feedback.rollback(decided);
  if (undecided == decided) unlearn();
  undecided.reset();
}

void ModelCore::check_open(const char* what) const {
  if (!step) refuse_usage(fmt::format("{}: no step is open; begin one first", what), "step");
}

void ModelCore::check_tensor(size_t tensor) const {
  if (tensor >= job.tensors.size())
    refuse_usage(fmt::format("tensor is {}; there are {}", tensor, job.tensors.size()), "tensor");
}

void ModelCore::forget() {
  if (taught)
    for (Learning* one : learnings) one->discard();
  taught.reset();
}

void ModelCore::save_learned() {
  for (const Learning* one : learnings) one->save(feedback);
  saved_ = feedback.extras();
}

void ModelCore::unlearn() {
  for (const auto& [name, bytes] : before_) feedback.set_extra(name, bytes);
  for (Learning* one : learnings) one->restore(feedback);
  saved_ = feedback.extras();
}

void ModelCore::follow_state() {
  if (feedback.extras() == saved_) return;
  for (Learning* one : learnings) one->restore(feedback);
  saved_ = feedback.extras();
}

}  // namespace gradwire
