// SPDX-License-Identifier: Apache-2.0
#include "collective/factor_exchange.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/lowrank/orthonormal.h"
#include "core/bits.h"
#include "core/refuse.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

std::string state_name(const FactoredMatrix& matrix) { return "lowrank/" + matrix.name; }

uint64_t factor_floats(const FactoredMatrix& matrix) {
  return matrix.codec.rank * (matrix.columns + (matrix.codec.alternate ? matrix.rows : 0));
}

// Extra state is a multiple of 8 bytes.
uint64_t state_bytes(const FactoredMatrix& matrix) { return (factor_floats(matrix) * sizeof(float) + 7) / 8 * 8; }

float largest(std::span<const float> values) {
  float top = 0;
  for (const float value : values) top = std::max(top, std::isfinite(value) ? std::abs(value) : HUGE_VALF);
  return top;
}

// Whether the mean of an exchange makes the result. With alternate=off the first one makes the base of the second.
bool makes_result(const LowRank& codec, bool second) { return codec.alternate != second; }

}  // namespace

FactorExchange::FactorExchange(Engine& engine, FactorPlan plan, ModelCore& model, ReduceTimer& timer)
    : plan_(std::move(plan)),
      model_(model),
      timer_(timer),
      pool_(model.job.device().threads),
      lost_weight_(model.job.options.op == ReduceOptions::Op::sum ? 1.0f : static_cast<float>(engine.size())),
      in_(plan_.tensors.size()),
      out_(plan_.tensors.size()) {
  std::vector<size_t> even, odd, later;
  for (const FactoredMatrix& one : plan_.matrices) {
    const uint64_t rank = one.codec.rank;
    Matrix made;
    made.of = one;
    made.p_start = starting_factor(hash_name(one.name + "/P"), one.codec.rank, one.rows);
    made.q_start = starting_factor(hash_name(one.name + "/Q"), one.codec.rank, one.columns);
    made.p = made.p_start;
    made.q = made.q_start;
    made.x_p.resize(rank * one.rows);
    made.x_q.resize(rank * one.columns);
    made.own.resize(rank * std::max(one.rows, one.columns));
    matrices_.push_back(std::move(made));
    even.push_back(one.p);
    odd.push_back(one.codec.alternate ? one.q : one.p);
    if (!one.codec.alternate) later.push_back(one.q);
    model_.feedback.add(Direction::up, one.name, one.rows * one.columns);
  }
  const auto bucket = [&](const std::vector<size_t>& tensors) {
    return std::make_unique<BucketTransfer>(engine, model_.job, model_.bucket(tensors), timer_);
  };
  first_.push_back(bucket(even));
  if (odd != even) first_.push_back(bucket(odd));
  if (!later.empty()) second_ = bucket(later);
  save();
  model_.save_learned();
}

void FactorExchange::save() {
  for (const Matrix& one : matrices_) {
    std::vector<std::byte> state(state_bytes(one.of));
    std::memcpy(state.data(), one.q.data(), one.q.size() * sizeof(float));
    if (one.of.codec.alternate)
      std::memcpy(state.data() + one.q.size() * sizeof(float), one.p.data(), one.p.size() * sizeof(float));
    model_.feedback.set_extra(state_name(one.of), state);
  }
}

void FactorExchange::read_state() {
  const auto& extras = model_.feedback.extras();
  for (Matrix& one : matrices_) {
    const auto found = extras.find(state_name(one.of));
    if (found == extras.end() || found->second.size() != state_bytes(one.of))
      refuse_usage(fmt::format("the state has {} of tensor '{}', which has {}",
                               found == extras.end() ? "no factors" : "factors of another size", one.of.name,
                               one.of.codec.str()),
                   "feedback");
    const std::byte* const state = found->second.data();
    std::memcpy(one.q.data(), state, one.q.size() * sizeof(float));
    if (one.of.codec.alternate)
      std::memcpy(one.p.data(), state + one.q.size() * sizeof(float), one.p.size() * sizeof(float));
    if (largest(one.q) > 2 || largest(one.p) > 2)  // they are orthonormal
      refuse_usage(fmt::format("the state has damaged factors of tensor '{}'", one.of.name), "feedback");
  }
}

uint64_t FactorExchange::hash() const {
  uint64_t hash = 0;
  const auto& extras = model_.feedback.extras();
  for (const Matrix& one : matrices_)
    if (const auto found = extras.find(state_name(one.of)); found != extras.end())
      hash = XXH64(found->second.data(), found->second.size(), hash);
  return hash;
}

void FactorExchange::begin(std::span<const void* const> in, std::span<void* const> out) {
  step_ = *model_.step;
  read_state();
  for (const auto& bucket : first_) bucket->follow(model_.epochs);
  first().begin(model_.context());
  if (second_) {
    second_->follow(model_.epochs);
    second_->begin(model_.context());
  }
  std::vector<TensorSpec> specs;
  for (const Matrix& one : matrices_) {
    const uint64_t count = one.of.rows * one.of.columns;
    if (!model_.feedback.holds(Direction::up, one.of.name, count))
      model_.feedback.add(Direction::up, one.of.name, count);
    specs.push_back({.name = one.of.name, .count = count, .dtype = DType::f32, .codec = Codec{}});
  }
  residuals_ = model_.feedback.begin(Direction::up, step_, specs, model_.how.loss_scale);
  for (size_t k = 0; k < matrices_.size(); ++k) {
    Matrix& one = matrices_[k];
    one.in = in[one.of.tensor];
    one.out = out[one.of.tensor];
    one.before = static_cast<const float*>(residuals_->before[k]);
    one.left = static_cast<float*>(residuals_->after[k]);
    one.finite = true;
    one.result_by_p = one.of.codec.alternate && one.of.codec.sends_p(step_);
    in_[one.of.p] = out_[one.of.p] = one.x_p.data();
    in_[one.of.q] = out_[one.of.q] = one.x_q.data();
    if (one.of.codec.sends_p(step_))
      project_rows(pool_, matrix(one), one.q.data(), one.x_p.data(), one.of.codec.alternate ? nullptr : one.left);
    else
      project_columns(pool_, matrix(one), one.p.data(), one.x_q.data());
  }
}

// Residuals are kept unscaled, so the matrix is.
LowRankMatrix FactorExchange::matrix(const Matrix& one) const {
  return {.rows = one.of.rows,
          .columns = one.of.columns,
          .rank = one.of.codec.rank,
          .gradient = one.in,
          .dtype = one.of.dtype,
          .residual = one.before,
          .factor = 1 / model_.how.loss_scale,
          .decay = model_.options.reduce.decay};
}

void FactorExchange::run(const Move& move) {
  exchange(first(), move, false);
  for (Matrix& one : matrices_)
    if (makes_result(one.of.codec, false))
      conclude(one);
    else
      make_base(one);
  if (!second_) return;
  exchange(*second_, move, true);
  for (Matrix& one : matrices_)
    if (makes_result(one.of.codec, true)) conclude(one);
}

void FactorExchange::exchange(BucketTransfer& bucket, const Move& move, bool second) {
  move(bucket, in_, out_);
  std::vector<void*> own(out_.size());
  bool results = false;
  for (Matrix& one : matrices_) {
    if (second && one.of.codec.alternate) continue;
    own[one.of.codec.sends_p(step_) && !second ? one.of.p : one.of.q] = one.own.data();
    results |= makes_result(one.of.codec, second);
  }
  if (!results) return;
  const auto timing = timer_.decode();
  bucket.decode_own(step_, own);
  if (model_.has_down()) add_lost(bucket, second);
}

// Only the owner of a shard knows what its rounding has left out of the mean.
void FactorExchange::add_lost(BucketTransfer& bucket, bool second) {
  std::vector<void*> places(out_.size());
  std::vector<std::vector<float>> exact(matrices_.size());
  for (size_t k = 0; k < matrices_.size(); ++k) {
    const Matrix& one = matrices_[k];
    const LowRank& codec = one.of.codec;
    if (codec.lossless_factors() || !makes_result(codec, second)) continue;
    exact[k] = one.mean();
    places[one.result_by_p ? one.of.p : one.of.q] = exact[k].data();
  }
  bucket.read_sums(places);
  for (size_t k = 0; k < matrices_.size(); ++k) {
    Matrix& one = matrices_[k];
    for (size_t i = 0; i < exact[k].size(); ++i) one.own[i] -= lost_weight_ * (exact[k][i] - one.mean()[i]);
  }
}

void FactorExchange::make_base(Matrix& one) {
  const auto timing = timer_.encode();
  one.finite = std::isfinite(largest(one.x_p));
  one.p = one.x_p;
  if (one.finite)
    make_orthonormal(one.p, one.of.codec.rank, one.p_start);
  else
    one.p = one.p_start;  // what follows is in vain, and must not trap
  project_columns(pool_, stored_matrix(matrix(one), one.left), one.p.data(), one.x_q.data());
}

// From the mean that makes the result: the result, the residual and the next base.
void FactorExchange::conclude(Matrix& one) {
  const auto timing = timer_.decode();
  const bool is_p = one.result_by_p;
  const uint32_t rank = one.of.codec.rank;
  const std::vector<float>& x = one.mean();
  const float scale = model_.how.loss_scale;
  // The rows of the other factor have the length one, so no element of it is larger than that.
  one.finite &= largest(x) * static_cast<float>(rank) * std::max(scale, 1.0f) < 0x1p126f;
  const LowRankProduct own =
      is_p ? LowRankProduct{one.own.data(), one.q.data()} : LowRankProduct{one.p.data(), one.own.data()};
  const LowRankProduct result = is_p ? LowRankProduct{x.data(), one.q.data()} : LowRankProduct{one.p.data(), x.data()};
  const LowRankMatrix m = one.of.codec.alternate ? matrix(one) : stored_matrix(matrix(one), one.left);
  if (!one.finite || split_product(pool_, m, own, result, scale, one.left, one.out, one.of.dtype)) return give_up(one);
  std::vector<float>& base = is_p ? one.p : one.q;
  base = x;
  make_orthonormal(base, rank, is_p ? one.p_start : one.q_start);
}

// A rank had a value that is not finite, or the result would have one. All ranks see the same mean, so they agree.
void FactorExchange::give_up(Matrix& one) {
  one.finite = false;
  const uint64_t count = one.of.rows * one.of.columns;
  if (one.of.dtype == DType::f32)
    std::fill_n(static_cast<float*>(one.out), count, bits_float(kMarker));
  else
    std::fill_n(static_cast<uint16_t*>(one.out), count, one.of.dtype == DType::f16 ? kMarkerF16 : kMarkerBf16);
  std::copy_n(one.before, count, one.left);
}

bool FactorExchange::finite() const {
  return std::all_of(matrices_.begin(), matrices_.end(), [](const Matrix& one) { return one.finite; });
}

uint64_t FactorExchange::bytes_sent() const { return first().bytes_sent() + (second_ ? second_->bytes_sent() : 0); }

uint64_t FactorExchange::message_memory() const {
  uint64_t bytes = second_ ? second_->message_memory() : 0;
  for (const auto& one : first_) bytes += one->message_memory();
  return bytes;
}

uint64_t FactorExchange::sum_memory() const {
  uint64_t bytes = second_ ? second_->core().sum_memory() : 0;
  for (const auto& one : first_) bytes += one->core().sum_memory();
  return bytes;
}

uint64_t FactorExchange::encoded_bytes(size_t matrix) const {
  const FactoredMatrix& one = plan_.matrices[matrix];
  const Codec& codec = model_.job.up[one.p];
  const uint64_t both = codec.bytes(one.codec.rank * one.rows) + codec.bytes(one.codec.rank * one.columns);
  return one.codec.alternate ? both / 2 : both;
}

}  // namespace gradwire
