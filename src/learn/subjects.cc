// SPDX-License-Identifier: Apache-2.0
#include "learn/subjects.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>

#include "codec/casq/clusters.h"
#include "codec/dqsgd/bits.h"
#include "codec/fft/fft.h"
#include "codec/optquant/levels.h"
#include "codec/rangefloat/mantissa.h"
#include "core/bits.h"
#include "gradwire/error.h"
#include "gradwire/message.h"
#include "gradwire/runner.h"

namespace gradwire {

void Evidence::add(const Evidence& other) {
  if (other.exponent == kNone) return;
  if (exponent == kNone) {
    *this = other;
    return;
  }
  // The coarser unit stays; what falls off the finer one's end is below its share of the sum.
  const int64_t top = std::max(exponent, other.exponent);
  const auto shift = [&](int64_t e) { return static_cast<int>(std::min<int64_t>(top - e, 63)); };
  for (size_t i = 0; i < counts.size(); ++i)
    counts[i] = (counts[i] >> shift(exponent)) + (other.counts[i] >> shift(other.exponent));
  exponent = top;
}

namespace {

double number(const Codec& codec, const char* name) {
  const std::string text = codec.get(name);
  double value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

[[noreturn]] void refuse_state(const Codec& codec, const std::string& why) {
  throw Error(ErrorKind::frame, fmt::format("learned state of {} {}", codec.name(), why), "learned");
}

// The units of a sample that are finite and not all zero, with a weight: their share of the squared norms, in 2^-digits of the largest.
struct Weighed {
  struct Unit {
    std::span<const float> values;
    float top;
    double rms;
    int64_t weight;
  };
  std::vector<Unit> units;
  int64_t exponent = Evidence::kNone;

  enum class By { top, rms };
  Weighed(std::span<const float> values, std::span<const uint32_t> lengths, int digits, By by) {
    double largest = 0;
    size_t at = 0;
    for (uint32_t length : lengths) {
      Unit unit{values.subspan(at, length), 0, 0, 0};
      at += length;
      double squares = 0;
      bool finite = true;
      for (float v : unit.values) {
        finite &= std::isfinite(v);
        unit.top = std::max(unit.top, std::fabs(v));
        squares += static_cast<double>(v) * v;
      }
      if (!finite || unit.top == 0) continue;
      unit.rms = std::sqrt(squares / length);
      largest = std::max(largest, by == By::top ? static_cast<double>(unit.top) : unit.rms);
      units.push_back(unit);
    }
    if (units.empty()) return;
    exponent = 2 * (std::ilogb(largest) + 1) - digits;
    for (Unit& unit : units) {
      const double size = by == By::top ? static_cast<double>(unit.top) : unit.rms;
      unit.weight = std::llround(std::ldexp(size * size, -static_cast<int>(exponent)));
    }
    std::erase_if(units, [](const Unit& unit) { return unit.weight == 0; });
  }
};

// Subjects that fit a table anew from time to time.
class Refitted : public Subject {
 public:
  Refitted(const Codec& codec, uint64_t start = 0)
      : base_(codec), start_(start), refit_(static_cast<uint64_t>(number(codec, "refit"))) {}

  bool due(uint64_t step) const override {
    const uint64_t done = step + 1;
    if (refit_ == 0) return false;
    if (start_ > 0 && done == start_) return true;
    if (done < start_) return false;
    const uint64_t since = done - start_;
    return since > 0 && (since % refit_ == 0 || (since < refit_ && std::has_single_bit(since)));
  }
  Codec codec(uint64_t step, double) const override { return step < start_ ? Codec() : current_; }
  void learn(uint64_t, const Evidence& pooled) override {
    if (pooled.exponent == Evidence::kNone) return;
    table_ = table_of(pooled);
    current_ = base_.fitted(table_);
  }
  std::vector<uint64_t> save() const override { return {table_.begin(), table_.end()}; }
  void restore(std::span<const uint64_t> state) override {
    std::vector<uint32_t> table(state.begin(), state.end());
    try {
      current_ = base_.fitted(table);
    } catch (const Error& error) {
      refuse_state(base_, error.what());
    }
    table_ = std::move(table);
  }

 protected:
  virtual std::vector<uint32_t> table_of(const Evidence& pooled) const = 0;
  Codec base_;
  uint64_t start_, refit_;
  std::vector<uint32_t> table_;
  Codec current_ = base_;
};

class Levels final : public Refitted {
 public:
  using Refitted::Refitted;
  size_t counts() const override { return LevelHistogram{}.counts.size(); }
  void look(std::span<const float> values, std::span<const uint32_t> lengths, Evidence& evidence) const override {
    LevelHistogram histogram;
    const Weighed sample(values, lengths, 20, Weighed::By::top);
    for (const auto& unit : sample.units) histogram.add(unit.values, unit.top, unit.weight);
    evidence.add({sample.exponent, std::move(histogram.counts)});
  }

 private:
  std::vector<uint32_t> table_of(const Evidence& pooled) const override {
    LevelHistogram histogram;
    histogram.counts = pooled.counts;
    const LevelRule rule{base_.get("mode") == "biased", number(base_, "kappa"), number(base_, "workers")};
    std::vector<uint32_t> table;
    for (float level : fit_levels(histogram, static_cast<int>(number(base_, "bits")), rule).levels)
      table.push_back(float_bits(level));
    return table;
  }
};

class ClusterTables final : public Refitted {
 public:
  explicit ClusterTables(const Codec& codec) : Refitted(codec, static_cast<uint64_t>(number(codec, "start"))) {}
  size_t counts() const override { return ClusterHistogram{}.words().size(); }
  void look(std::span<const float> values, std::span<const uint32_t> lengths, Evidence& evidence) const override {
    ClusterHistogram histogram;
    const Weighed sample(values, lengths, 12, Weighed::By::rms);
    for (const auto& unit : sample.units) histogram.add(unit.values, unit.rms, static_cast<uint32_t>(unit.weight));
    evidence.add({sample.exponent, {histogram.words().begin(), histogram.words().end()}});
  }

 private:
  std::vector<uint32_t> table_of(const Evidence& pooled) const override {
    ClusterHistogram histogram;
    std::copy(pooled.counts.begin(), pooled.counts.end(), histogram.words().begin());
    const bool paper = base_.get("mode") == "paper";
    const int bits = static_cast<int>(number(base_, "bits"));
    const double budget = number(base_, "budget"), cut = number(base_, "cut");
    const Clusters clusters = fit_clusters(
        histogram, bits, budget, cut > 0 || paper ? ClusterMode::paper : ClusterMode::best, cut > 0 ? cut : 0.95);
    std::vector<uint32_t> table;
    for (float threshold : clusters.thresholds) table.push_back(float_bits(threshold));
    if (!paper) {
      table.insert(table.end(), clusters.order.begin(), clusters.order.end());
      return table;
    }
    // Shares in 2^-16 of the buckets, whatever their number will be.
    const std::string rule = base_.get("rule");
    std::vector<double> list(clusters.centres.size(), 200);
    list.front() = list.back() = 500000;
    const double seen = std::max(1.0, histogram.total());
    std::vector<double> counts = clusters.counts;
    for (double& count : counts) count *= 65536 / budget / seen;  // as many elements as 65536 buckets are for
    const std::vector<uint32_t> shares = rule == "optimal"   ? allocate_hash(counts, clusters.variances, 65536)
                                         : rule == "density" ? allocate_paper(clusters, PaperRule::density, 65536)
                                         : rule == "entropy" ? allocate_paper(clusters, PaperRule::entropy, 65536)
                                                             : allocate_paper(clusters, PaperRule::list, 65536, list);
    table.insert(table.end(), shares.begin(), shares.end());
    return table;
  }
};

// rangefloat, and fft's parts, which are relative to the largest of them.
class Mantissa : public Refitted {
 public:
  using Refitted::Refitted;
  bool due(uint64_t step) const override { return base_.get("mantissa") == "0" && Refitted::due(step); }
  size_t counts() const override { return MagnitudeHistogram{}.words().size(); }
  void look(std::span<const float> values, std::span<const uint32_t> lengths, Evidence& evidence) const override {
    MagnitudeHistogram histogram;
    const Weighed sample(values, lengths, 12, Weighed::By::top);
    add(histogram, sample.units);
    evidence.add({sample.exponent, {histogram.words().begin(), histogram.words().end()}});
  }

 protected:
  virtual void add(MagnitudeHistogram& histogram, std::span<const Weighed::Unit> units) const {
    const double fixed = number(base_, "max");
    for (const auto& unit : units)
      histogram.add(unit.values, fixed > 0 ? static_cast<float>(fixed) : unit.top, static_cast<uint32_t>(unit.weight));
  }
  std::vector<uint32_t> table_of(const Evidence& pooled) const override {
    MagnitudeHistogram histogram;
    std::copy(pooled.counts.begin(), pooled.counts.end(), histogram.words().begin());
    return {static_cast<uint32_t>(
        choose_mantissa(histogram, static_cast<int>(number(base_, "bits")), base_.get("mode") == "paper"))};
  }
};

class Frequencies final : public Mantissa {
 public:
  using Mantissa::Mantissa;
  bool due(uint64_t step) const override { return base_.get("format") == "range" && Mantissa::due(step); }
  Codec codec(uint64_t step, double rate) const override {
    double theta = number(base_, "theta");
    const std::string schedule = base_.get("schedule");
    if (schedule == "step" && step >= static_cast<uint64_t>(number(base_, "until"))) theta = 0;
    if (schedule == "rate") theta = std::min(theta, std::sqrt(std::max(0.0, number(base_, "smooth") * rate)));
    if (theta == number(base_, "theta") && table_.empty()) return base_;
    const uint64_t bits = std::bit_cast<uint64_t>(theta);
    const uint32_t mantissa = table_.empty() ? base_.scheme().steps : table_[0];
    return base_.fitted(
        std::vector<uint32_t>{mantissa, static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)});
  }
  void learn(uint64_t, const Evidence& pooled) override {
    if (pooled.exponent != Evidence::kNone) table_ = table_of(pooled);
  }
  void restore(std::span<const uint64_t> state) override {
    if (state.size() > 1 || (state.size() == 1 && (state[0] < 1 || state[0] > number(base_, "bits") - 2)))
      refuse_state(base_, "has no mantissa that fits");
    table_.assign(state.begin(), state.end());
  }

 private:
  // The parts that would be sent, as the codec itself makes them.
  void add(MagnitudeHistogram& histogram, std::span<const Weighed::Unit> units) const override {
    std::vector<TensorSpec> list;
    std::vector<const void*> in;
    for (const auto& unit : units) {
      list.push_back({"", unit.values.size(), DType::f32, base_.with("format", "float")});
      in.push_back(unit.values.data());
    }
    const Plan plan(std::move(list));
    std::vector<std::byte> message(plan.message_bytes());
    make_runner(plan, {})->encode(in, {}, message);
    const Head head =
        read_head(message, {.max_elements = plan.elements(), .max_tensors = static_cast<uint32_t>(units.size())});
    for (size_t i = 0; i < units.size(); ++i) {
      const FftScheme scheme = fft_scheme(plan.tensors()[i].codec.scheme());
      const uint32_t bins = fft_size(scheme.chunk, units[i].values.size()) / 2;
      std::vector<float> parts(2 * fft_kept(scheme, bins));
      std::memcpy(parts.data(), message.data() + head.head_bytes + head.body_offsets[i] + bins / 8,
                  parts.size() * sizeof(float));
      histogram.add(parts, 1.0f, static_cast<uint32_t>(units[i].weight));
    }
  }
};

// dqsgd. What drives the rounding noise of a step is the mean over its elements of the squared norm of their bucket.
class Width final : public Subject {
 public:
  Width(const Codec& codec, uint64_t elements, int world)
      : base_(codec), rule_(rule_of(codec, elements, world)), controller_(rule_) {
    set(base_.scheme().bits);
  }
  Source source() const override { return Source::sides; }
  bool due(uint64_t) const override { return true; }
  bool ahead() const override { return base_.get("mode") == "paper"; }
  size_t counts() const override { return 1; }  // sum of elements * norm^2
  // Before a step was seen, nothing may be sent as zeros: its norms could not be read from the message.
  Codec codec(uint64_t step, double) const override {
    return ahead() && bits_ == 0 && decided_ != step ? width(rule_.least) : current_;
  }
  void look_sides(std::span<const uint32_t> sides, std::span<const uint32_t> elements,
                  Evidence& evidence) const override {
    double sum = 0;
    bool any = false;
    for (size_t u = 0; u < sides.size(); ++u) {
      const double norm = bits_float(sides[u]);
      if (sides[u] >= kInfBits) continue;
      sum += norm * norm * elements[u];
      any = true;
    }
    if (!any) return;
    const int64_t exponent = sum > 0 ? std::ilogb(sum) - 40 : -400;
    evidence.add({exponent, {sum > 0 ? std::llround(std::ldexp(sum, -static_cast<int>(exponent))) : 0}});
  }
  void learn(uint64_t step, const Evidence& pooled) override {
    if (!ahead()) controller_.spent(bits_);
    if (pooled.exponent != Evidence::kNone) {
      const double mean = std::ldexp(static_cast<double>(pooled.counts[0]), static_cast<int>(pooled.exponent)) /
                          (rule_.dimension * rule_.workers),
                   norm = std::sqrt(mean);
      const int bits = controller_.decide(ahead() ? step : step + 1, norm);
      // Nothing is sent only where this very step is known to be zero.
      set(bits > 0 || ahead() ? bits : rule_.least);
      decided_ = step;
    }
    if (ahead()) controller_.spent(bits_);
  }
  std::vector<uint64_t> save() const override {
    std::vector<uint64_t> state = controller_.save();
    state.push_back(static_cast<uint64_t>(bits_));
    return state;
  }
  void restore(std::span<const uint64_t> state) override {
    if (state.empty() || (state.back() != 0 && (state.back() < static_cast<uint64_t>(rule_.least) ||
                                                state.back() > static_cast<uint64_t>(rule_.most))))
      refuse_state(base_, "has no number of bits that is allowed");
    controller_.restore(state.first(state.size() - 1));
    set(static_cast<int>(state.back()));
  }

 private:
  static BitRule rule_of(const Codec& codec, uint64_t elements, int world) {
    BitRule rule;
    rule.error = number(codec, "error");
    rule.form = rule.error > 0 ? BitRule::Form::error : BitRule::Form::budget;
    rule.convex = codec.get("rule") == "convex";
    rule.steps = static_cast<uint64_t>(number(codec, "steps"));
    rule.alpha = number(codec, "alpha");
    rule.eta = number(codec, "eta");
    rule.smooth = number(codec, "smooth");
    rule.dimension = static_cast<double>(std::max<uint64_t>(elements, 1));
    rule.workers = world;
    rule.least = static_cast<int>(number(codec, "min"));
    rule.most = static_cast<int>(number(codec, "max"));
    rule.budget = std::clamp<double>(number(codec, "budget"), rule.least,
                                     rule.most);  // what no width can keep is brought to one that can
    return rule;
  }
  void set(int bits) {
    bits_ = bits;
    current_ = width(bits);
  }
  Codec width(int bits) const { return base_.fitted(std::vector<uint32_t>{static_cast<uint32_t>(bits)}); }

  Codec base_, current_;
  BitRule rule_;
  BitController controller_;
  int bits_ = 0;
  uint64_t decided_ = UINT64_MAX;  // the step that bits_ was decided in
};

}  // namespace

std::unique_ptr<Subject> subject_of(const Codec& codec, uint64_t elements, int world) {
  if (codec.name() == "optquant") return std::make_unique<Levels>(codec);
  if (codec.name() == "casq") return std::make_unique<ClusterTables>(codec);
  if (codec.name() == "rangefloat") return std::make_unique<Mantissa>(codec);
  if (codec.name() == "fft") return std::make_unique<Frequencies>(codec);
  if (codec.name() == "dqsgd") return std::make_unique<Width>(codec, elements, world);
  return nullptr;
}

}  // namespace gradwire
