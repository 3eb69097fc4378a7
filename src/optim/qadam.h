// SPDX-License-Identifier: Apache-2.0
// qadam: Adam that runs at every worker, for updates that are compressed on their way (docs/algorithms.md). A worker
// keeps moments of its own gradients; its update is the ratio of them times the learning rate, so the step size goes
// through the compressor. The residual is no part of it: the codec's error feedback adds it while it encodes.
//
//   m <- beta m + (1 - beta) g          update = rate / (1 - beta^k) * m / (sqrt(s / (1 - theta^k)) + epsilon)
//   v <- theta v + (1 - theta) g^2      s: v, or the shared moment
//
// The shared moment follows the worker's own gradients as v does, so that it never stays at zero where a gradient wakes
// up, but now and then all workers put the mean of their v in its place.
//
// k counts this worker's own steps, so that one that joins late is warm at once. Without correction it is the paper's:
// v begins at epsilon, update = rate * m / sqrt(s); and with the theory's schedule theta is 1 - theta / k.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/bits.h"
#include "gradwire/runner.h"
#include "optim/elementwise.h"

namespace gradwire {

struct Memory;

struct QAdamOptions {
  double beta = 0.9, theta = 0.999, epsilon = 1e-8;
  bool correction = true;     // of the bias of young moments
  bool theory = false;        // theta_k = 1 - theta / k; no correction
  bool shared = false;        // the second moment is pooled over workers now and then
  uint64_t share_every = 16;  // steps; before the first of them at steps 1, 2, 4, 8, ...
};

// A step's numbers, alike for all elements.
struct QAdamNumbers {
  float beta, fresh;          // of the first moment: what stays, what comes
  float theta, fresh_square;  // ... of the second
  float rate, root, epsilon;  // corrected
};

// Below it a square is no f32 any more: without epsilon a coordinate that never moved would be 0 / 0.
inline constexpr float kLeastRoot = 1e-19f;

// One element: moments are brought up to date, the update is returned. `shared` counts where kShared is set. Every
// operation is rounded by itself, so that all devices give the same bits.
template <bool kShared>
GW_HD inline float qadam_element(const QAdamNumbers& n, float g, float& m, float& v, float& shared) {
  m = n.beta * m + n.fresh * g;
  v = n.theta * v + n.fresh_square * (g * g);
  if constexpr (kShared) shared = n.theta * shared + n.fresh_square * (g * g);
  const float below = sqrtf(kShared ? shared : v) / n.root + n.epsilon;
  return n.rate * (m / (below > kLeastRoot ? below : kLeastRoot));
}

// The element rule. `out` is the update. Without kMoves there is no gradient: the moments stay as they are, as the
// numbers say too. Without kShared there is no shared moment.
template <bool kMoves, bool kShared>
struct QAdamRule {
  QAdamNumbers numbers;

  GW_HD void operator()(const OptimizerSpan& s, uint64_t i) const {
    float m = s.first[i], v = s.second[i], shared = kShared ? s.shared[i] : 0.0f;
    s.out[i] = qadam_element<kShared>(numbers, kMoves ? s.gradient[i] : 0.0f, m, v, shared);
    s.first[i] = m;
    s.second[i] = v;
    if constexpr (kShared) s.shared[i] = shared;
  }
};

// Throws Error{usage} that names the first option that is refused.
void check(const QAdamOptions& options);

// One step of arrays that the caller owns: moments are brought up to date and updates written. `taken` counts the
// steps, this one included. Without `moves` there are no gradients: the updates of step `taken` are computed anew, from
// the moments as they are. On a GPU it only enqueues.
void qadam_step(const Elementwise& device, std::span<const OptimizerSpan> spans, const QAdamOptions& options,
                uint64_t taken, double rate, bool moves);
double qadam_correction(const QAdamOptions& options, uint64_t taken);  // what young second moments are divided by
bool qadam_pools(const QAdamOptions& options, uint64_t step);          // whether they are pooled in this step, from 0

// The moments of one worker, with the steps that they take.
class QAdam {
 public:
  enum class Moment { first, second, shared };

  // Pointers given to the calls below are `device`'s, one a parameter; on a GPU the calls only enqueue.
  QAdam(std::vector<uint64_t> counts, const QAdamOptions& options, const Device& device = {});
  ~QAdam();

  // Gradients must be finite: whatever is in a moment stays there.
  void step(double rate, std::span<const float* const> gradients, std::span<float* const> updates);
  // The last step's updates anew, from the moments as they are: after pool().
  void again(double rate, std::span<float* const> updates);

  bool pools(uint64_t step) const { return qadam_pools(options_, step); }
  // `mean` gets this worker's second moments, corrected where that is asked for, as arrays of the host, and leaves the
  // mean over workers in them.
  void pool(const std::function<void(std::span<float* const>)>& mean);

  // What must be kept with a run: arrays, as f32 on the host, and a count.
  std::vector<Moment> moments() const;
  std::vector<float> read(Moment moment, size_t parameter) const;
  void write(Moment moment, size_t parameter, std::span<const float> values);
  uint64_t taken = 0;  // steps

  uint64_t bytes() const;  // that the moments take

 private:
  struct ParameterArrays;
  void run(double rate, std::span<const float* const> gradients, std::span<float* const> updates);
  ParameterArrays& arrays(Moment moment) const;

  std::vector<uint64_t> counts_;
  QAdamOptions options_;
  Device device_;
  std::shared_ptr<Memory> memory_;
  std::unique_ptr<ParameterArrays> first_, second_, shared_;
  Elementwise elementwise_;
};

}  // namespace gradwire
