// SPDX-License-Identifier: Apache-2.0
#include "codec/fft/fitter.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "codec/define.h"
#include "codec/fft/kernels.h"
#include "codec/rangefloat/fitter.h"
#include "core/float_mode.h"
#include "gradwire/error.h"

namespace gradwire {
namespace {

class FrequencyFitter final : public MantissaFitter {
 public:
  using MantissaFitter::MantissaFitter;
  bool due(uint64_t step) const override { return base_.get("format") == "range" && MantissaFitter::due(step); }
  Codec codec(uint64_t step, double rate) const override {
    double theta = number_of(base_, "theta");
    const std::string schedule = base_.get("schedule");
    if (schedule == "step" && step >= static_cast<uint64_t>(number_of(base_, "until"))) theta = 0;
    if (schedule == "rate") {
      if (!(rate >= 0))
        throw Error(ErrorKind::usage,
                    fmt::format("{} follows the learning rate, and none was given (set_rate)", base_.str()), "rate");
      rate_ = rate;
      theta = std::min(theta, std::sqrt(number_of(base_, "smooth") * rate));
    }
    if (theta == number_of(base_, "theta") && table_.empty()) return base_;
    const uint64_t bits = std::bit_cast<uint64_t>(theta);
    const uint32_t mantissa = table_.empty() ? scheme_of(base_).steps : table_[0];
    return base_.fitted(
        std::vector<uint32_t>{mantissa, static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)});
  }
  // The theorem is for L eta <= 1/4, and so for theta <= 1/2.
  std::string plan() const override {
    if (base_.get("schedule") != "rate" || rate_ < 0) return {};
    const double product = number_of(base_, "smooth") * rate_;
    return fmt::format("theta^2 = L eta = {:.3g}; the theorem of the paper needs at most 0.25, so it {}", product,
                       product <= 0.25 ? "holds" : "says nothing about this rate");
  }
  void learn(uint64_t, const FitStats& pooled) override {
    if (pooled.exponent != FitStats::kNone) table_ = table_of(pooled);
  }
  void restore(std::span<const uint64_t> state) override {
    if (state.size() > 1 || (state.size() == 1 && (state[0] < 1 || state[0] > number_of(base_, "bits") - 2)))
      refuse_state(base_, "has no mantissa that fits");
    table_.assign(state.begin(), state.end());
  }

 private:
  mutable double rate_ = -1;  // of the last step; for plan() only

  // The parts that would be sent, as the codec's own transform makes them: relative to the largest of their unit.
  void add(MagnitudeHistogram& histogram, std::span<const WeightedSample::Unit> units) const override {
    const FloatMode mode;
    const FftKernels& kernels = fft_kernels(kernels_named(""));
    const FftScheme scheme = fft_scheme(scheme_of(base_.with("format", "float")));
    const auto scratch = std::make_unique<Scratch>();
    const FftWork work(*scratch);
    uint32_t memory = 0;
    for (const auto& unit : units) {
      const uint32_t size = fft_size(scheme.chunk, unit.values.size()), bins = size / 2;
      std::copy(unit.values.begin(), unit.values.end(), work.x);
      std::fill(work.x + unit.values.size(), work.x + size, 0.0f);
      std::vector<uint32_t> words(fft_size_words(scheme, size));
      kernels.encode(scheme, range_float_of(scheme), work.x, size, words.data(), nullptr, 1.0f, memory, work);
      std::vector<float> parts(2 * fft_kept(scheme, bins));
      std::memcpy(parts.data(), words.data() + bins / 32, parts.size() * sizeof(float));
      histogram.add(parts, 1.0f, static_cast<uint32_t>(unit.weight));
    }
  }
};

}  // namespace

std::unique_ptr<Fitter> fft_fitter(const Codec& codec, const FitContext&) {
  return std::make_unique<FrequencyFitter>(codec);
}

}  // namespace gradwire
