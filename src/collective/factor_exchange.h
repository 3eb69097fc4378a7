// SPDX-License-Identifier: Apache-2.0
// The part of a Reducer's step in which matrices travel as factors (docs/algorithms.md, lowrank). For a matrix of n
// rows and m columns, with factors p (rank x n) and q (rank x m) that all ranks have alike:
//
//   M = gradient + residual
//   alternate=off   x = mean of q M^T;  p = orthonormal x;  x = mean of p M;  result p^T x;  q = orthonormal x
//   alternate=on    at even steps  x = mean of q M^T;  result x^T q;  p = orthonormal x
//                   at odd steps   x = mean of p M;    result p^T x;  q = orthonormal x
//   residual = M - what this rank has added to the result
//
// A mean is an exchange of messages like any other. What this rank has added is the product with its own message, as
// the others decode it; and what the rounding of a mean has left out is added to the residual of the mean's owner, as
// often as there are ranks, so that nothing is lost.
//
// Residuals are those of an ErrorFeedback, by the matrix's name. Its extra state has the factors.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "codec/lowrank/products.h"
#include "collective/bucket_transfer.h"
#include "collective/factor_plan.h"
#include "collective/model_core.h"
#include "core/pool.h"

namespace gradwire {

class FactorExchange {
 public:
  // Adds residuals and extra state to those of `model`, whose tensors are those of the plan.
  FactorExchange(Engine& engine, FactorPlan plan, ModelCore& model, ReduceTimer& timer);

  const FactorPlan& plan() const { return plan_; }
  uint64_t hash() const;  // of the factors that the state has

  // Takes factors and residuals of the open step, and makes what is sent first. This may fail on one rank alone.
  void begin(std::span<const void* const> in, std::span<void* const> out);

  // One exchange of factors: with a bucket, and tensors of the core's list.
  using Move = std::function<void(BucketTransfer&, std::span<const void* const>, std::span<void* const>)>;
  void run(const Move& move);
  bool finite() const;  // whether all results are. The same on all ranks
  void save();          // the factors that the step leaves, as extra state

  uint64_t bytes_sent() const;  // to other ranks in the last step, or the first
  uint64_t message_memory() const;
  uint64_t sum_memory() const;
  uint64_t encoded_bytes(size_t matrix) const;  // see Reducer::encoded_bytes

 private:
  struct Matrix {
    FactoredMatrix of;
    std::vector<float> p_start, q_start, p, q;  // p is kept from step to step with alternate only
    std::vector<float> x_p, x_q;                // what is sent, then its mean
    std::vector<float> own;                     // what this rank has added to the mean that makes the result
    const void* in = nullptr;
    void* out = nullptr;
    const float* before = nullptr;
    float* left = nullptr;     // the residual that the step will leave
    bool result_by_p = false;  // in this step the result is made of the mean of p
    bool finite = true;
    const std::vector<float>& mean() const { return result_by_p ? x_p : x_q; }
  };

  BucketTransfer& first() const { return *first_[step_ % first_.size()]; }
  void read_state();
  LowRankMatrix matrix(const Matrix& one) const;
  void exchange(BucketTransfer& bucket, const Move& move, bool second);
  void add_lost(BucketTransfer& bucket, bool second);
  void make_base(Matrix& one);
  void conclude(Matrix& one);
  void give_up(Matrix& one);

  FactorPlan plan_;
  ModelCore& model_;
  ReduceTimer& timer_;
  Pool pool_;
  float lost_weight_;  // of what the rounding of a mean has left out
  std::vector<Matrix> matrices_;
  std::vector<std::unique_ptr<BucketTransfer>> first_;  // one, or one for steps of each parity
  std::unique_ptr<BucketTransfer> second_;
  std::unique_ptr<ErrorFeedback::Pointers> residuals_;
  std::vector<const void*> in_;  // of the core's list
  std::vector<void*> out_;
  uint64_t step_ = 0;
};

}  // namespace gradwire
