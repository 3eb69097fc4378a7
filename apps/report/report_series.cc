// SPDX-License-Identifier: Apache-2.0
// Groups runs into series and computes what is shown of them: see report_series.h.
#include "report/report_series.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "gradwire/error.h"

namespace gradwire::app {
namespace {

constexpr uint64_t kBitsBins = 100;
constexpr size_t kMostBitsPoints = 300;  // more could not be seen in a chart and would only enlarge the page

std::vector<std::pair<std::string, std::string>> settings_of(const Run& run) {
  return {{"codec", run.canonical},
          {"task", run.task},
          {"model", run.model},
          {"metric", name_of(run.metric)},
          {"parameters", fmt::format("{}", run.parameters)},
          {"workers", fmt::format("{}", run.workers)},
          {"collective", run.collective},
          {"engine", run.engine},
          {"device", run.device},
          {"machine", run.machine},
          {"batch", fmt::format("{}", run.batch)},
          {"optimizer", run.optimizer},
          {"rate", fmt::format("{}", run.rate)},
          {"schedule", run.schedule}};
}

// A setting as part of a label: a word explains itself, a number needs the name of the setting.
std::string shown(const std::pair<std::string, std::string>& setting) {
  const auto& [name, value] = setting;
  if (name == "workers" || name == "epochs" || name == "parameters") return value + " " + name;
  if (name == "batch" || name == "rate") return name + " " + value;
  return value;
}

// True for an uncompressed run, whatever else its spec says.
bool is_fp32(const Run& run) { return run.canonical.substr(0, run.canonical.find(':')) == "fp32"; }

double mean(const std::vector<double>& values) { return statistic_of(values).mean; }

template <class Of>
double mean_of(const std::vector<const Run*>& runs, Of of) {
  std::vector<double> values;
  for (const Run* run : runs)
    if (!run->epochs.empty()) values.push_back(of(*run));
  return mean(values);
}

// The bits of an epoch are weighted by its steps: epochs differ in length if a run was resumed in the middle of one.
double mean_bits(const Run& run) {
  double sum = 0;
  uint64_t before = 0;
  for (const Epoch& epoch : run.epochs) {
    sum += epoch.bits * static_cast<double>(epoch.step - std::min(before, epoch.step));
    before = epoch.step;
  }
  return before == 0 ? run.epochs.back().bits : sum / static_cast<double>(before);
}

// All evaluations of a run, those at the ends of epochs among them. A run of fewer steps ends within its last epoch,
// and that end stands where it belongs among the others.
std::vector<Evaluation> evaluations_of(const Run& run) {
  std::vector<Evaluation> all = run.points;
  const auto place_of = [&](const Epoch& epoch) {
    const double whole = static_cast<double>(epoch.epoch);
    if (run.points.empty() || run.points.front().step == 0) return whole;
    const double epochs_per_step = run.points.front().epoch / static_cast<double>(run.points.front().step);
    const double place = epochs_per_step * static_cast<double>(epoch.step);
    return place < whole - 1e-6 ? place : whole;
  };
  for (const Epoch& epoch : run.epochs)
    all.push_back({.epoch = place_of(epoch),
                   .step = epoch.step,
                   .test_loss = epoch.test_loss,
                   .test_accuracy = epoch.test_accuracy,
                   .bytes_sent = epoch.bytes_sent,
                   .seconds = epoch.seconds});
  return all;
}

std::vector<Point> curve_of(const Series& series) {
  std::map<double, std::vector<Evaluation>> by_epoch;
  for (const Run* run : series.counted)
    for (const Evaluation& one : evaluations_of(*run)) by_epoch[one.epoch].push_back(one);
  std::vector<Point> curve;
  for (const auto& [epoch, evaluations] : by_epoch) {
    std::vector<double> value, bytes, busy, steps;
    for (const Evaluation& one : evaluations) {
      const double step = static_cast<double>(one.step);
      value.push_back(value_of(one, series.first().metric));
      bytes.push_back(one.bytes_sent);
      busy.push_back(series.compute.median * step + one.seconds.encode + one.seconds.decode);
      steps.push_back(step);
    }
    curve.push_back({epoch, statistic_of(value), mean(bytes), mean(busy), mean(steps)});
  }
  return curve;
}

// Of what the compute time of a step depends on. With qadam it includes the codec of the weights, so codecs are not
// pooled.
std::vector<std::string> compute_key(const Series& series) {
  std::vector<std::string> key;
  for (const auto& [name, value] : series.settings) {
    const bool own_codec = name == "codec" && series.first().optimizer == "qadam";
    if (own_codec || !std::set<std::string>{"codec", "collective", "rate", "schedule", "epochs"}.contains(name))
      key.push_back(value);
  }
  return key;
}

void fill_compute(std::vector<Series>& all) {
  std::map<std::vector<std::string>, std::vector<double>> seconds;
  for (const Series& series : all)
    for (const Run* run : series.counted)
      if (!run->epochs.empty() && run->epochs.back().step > 0)
        seconds[compute_key(series)].push_back(run->epochs.back().seconds.compute /
                                               static_cast<double>(run->epochs.back().step));
  for (auto& [key, values] : seconds) std::sort(values.begin(), values.end());
  for (Series& series : all) {
    const auto found = seconds.find(compute_key(series));
    if (found == seconds.end()) continue;
    const std::vector<double>& sorted = found->second;
    const size_t n = sorted.size();
    series.compute = {(sorted[(n - 1) / 2] + sorted[n / 2]) / 2, sorted.front(), sorted.back(), n};
  }
}

// Too many points for a chart. A point says that the bits hold from its step until the next point, so a bin of equally
// many steps is the mean of the bits over these steps. A mean over points would ignore how long each of them lasts.
std::vector<std::pair<uint64_t, double>> mean_by_bins(const std::vector<std::pair<uint64_t, double>>& points) {
  const uint64_t first = points.front().first, steps = points.back().first + 1 - first;
  std::vector<std::pair<uint64_t, double>> bins;
  size_t at = 0;
  for (uint64_t bin = 0; bin < std::min<uint64_t>(kBitsBins, steps); ++bin) {
    const uint64_t count = std::min<uint64_t>(kBitsBins, steps);
    const uint64_t begin = first + steps * bin / count, end = first + steps * (bin + 1) / count;
    double sum = 0;
    for (uint64_t step = begin; step < end;) {
      while (at + 1 < points.size() && points[at + 1].first <= step) ++at;
      const uint64_t next = at + 1 < points.size() ? std::min(end, points[at + 1].first) : end;
      sum += static_cast<double>(next - step) * points[at].second;
      step = next;
    }
    bins.emplace_back(begin, sum / static_cast<double>(end - begin));
  }
  return bins;
}

void fill_bits(Series& series) {
  std::map<uint64_t, std::vector<double>> by_step;
  for (const Run* run : series.counted)
    for (const auto& [step, bits] : run->bits_over_time) by_step[step].push_back(bits);
  std::vector<std::pair<uint64_t, double>> all;
  for (const auto& [step, bits] : by_step) all.emplace_back(step, mean(bits));
  if (all.empty()) return;
  const auto less = [](const auto& a, const auto& b) { return a.second < b.second; };
  const auto [least, most] = std::minmax_element(all.begin(), all.end(), less);
  series.bits_change = most->second - least->second > 0.01 * most->second;
  series.bits_least = least->second;
  series.bits_most = most->second;
  series.bits_over_time = all.size() <= kMostBitsPoints ? all : mean_by_bins(all);
}

void fill_layers(Series& series) {
  std::map<std::string, std::pair<std::vector<double>, std::vector<double>>> by_name;  // errors, cosines
  const Measurement* pattern = nullptr;
  for (const Run* run : series.counted) {
    if (run->layers.empty()) continue;
    if (pattern == nullptr) pattern = &run->layers.back();
    for (const TensorError& tensor : run->layers.back().tensors) {
      by_name[tensor.name].first.push_back(tensor.error);
      by_name[tensor.name].second.push_back(tensor.cosine);
    }
  }
  if (pattern == nullptr) return;
  series.layers = *pattern;
  for (TensorError& tensor : series.layers.tensors) {
    tensor.error = mean(by_name[tensor.name].first);
    tensor.cosine = mean(by_name[tensor.name].second);
  }
}

void fill(Series& series) {
  std::sort(series.runs.begin(), series.runs.end(), [](const Run* a, const Run* b) { return a->seed < b->seed; });
  for (size_t i = 1; i < series.runs.size(); ++i)
    if (series.runs[i]->seed == series.runs[i - 1]->seed)
      throw Error(ErrorKind::frame,
                  fmt::format("seed {} of {} is there twice; expected one run of a seed with the same settings",
                              series.runs[i]->seed, series.first().codec),
                  "seed");
  for (const Run* run : series.runs)
    if (run->finished) series.counted.push_back(run);
  series.partial = series.counted.empty();
  if (series.partial) series.counted = series.runs;

  std::vector<double> finals;
  for (const Run* run : series.counted)
    if (!run->epochs.empty()) finals.push_back(value_of(run->epochs.back(), run->metric));
  series.final_value = statistic_of(finals);
  const auto last = [&](auto of) {
    return mean_of(series.counted, [of](const Run& run) { return of(run.epochs.back()); });
  };
  series.bits = mean_of(series.counted, mean_bits);
  series.ratio = mean_of(series.counted, ratio_of);
  series.bytes = last([](const Epoch& e) { return e.bytes_sent; });
  series.skipped = mean_of(series.counted, [](const Run& run) { return static_cast<double>(run.skipped_steps); });
  series.seconds = {
      last([](const Epoch& e) { return e.seconds.wall; }), last([](const Epoch& e) { return e.seconds.compute; }),
      last([](const Epoch& e) { return e.seconds.encode; }), last([](const Epoch& e) { return e.seconds.wait; }),
      last([](const Epoch& e) { return e.seconds.decode; })};
  if (const double own = series.seconds.encode + series.seconds.decode; own > 0 && std::isfinite(series.ratio)) {
    const double fp32 = series.bytes * series.ratio;
    const auto pays = [&](double rival) { return std::max(0.0, (rival - series.bytes) * 8e-9 / own); };
    series.pays_fp32 = pays(fp32);
    series.pays_half = pays(fp32 / 2);
  }
  fill_bits(series);
  fill_layers(series);
}

// The length of a run is one of its settings, but only a finished run shows it. An unfinished run joins the series that
// it would have belonged to, or the longest one if there are several.
std::vector<Series> make_series(const std::vector<Run>& runs) {
  std::vector<Series> all;
  const auto join = [&all](const Run& run, auto settings) {
    auto found = std::find_if(all.begin(), all.end(), [&](const Series& s) { return s.settings == settings; });
    if (found == all.end()) {
      all.emplace_back().settings = std::move(settings);
      found = all.end() - 1;
    }
    found->runs.push_back(&run);
  };
  for (const Run& run : runs) {
    if (!run.finished) continue;
    auto settings = settings_of(run);
    settings.emplace_back("epochs", fmt::format("{}", run.epochs.back().epoch));
    join(run, std::move(settings));
  }
  for (const Run& run : runs) {
    if (run.finished) continue;
    auto settings = settings_of(run);
    const Series* longest = nullptr;
    for (const Series& series : all) {
      const bool same = std::equal(settings.begin(), settings.end(), series.settings.begin());
      if (same && series.first().finished &&
          (longest == nullptr || series.first().epochs.back().epoch > longest->first().epochs.back().epoch))
        longest = &series;
    }
    settings.emplace_back("epochs", "");
    join(run, longest != nullptr ? longest->settings : std::move(settings));
  }
  return all;
}

void fill_groups(Comparison& comparison) {
  for (Series& series : comparison.series) {
    const Run& run = series.first();
    auto found = std::find_if(comparison.groups.begin(), comparison.groups.end(), [&](const RunGroup& group) {
      return group.task == run.task && group.model == run.model && group.metric == run.metric;
    });
    if (found == comparison.groups.end())
      found = comparison.groups.insert(found, RunGroup{run.task, run.model, run.metric, {}});
    series.group = static_cast<size_t>(found - comparison.groups.begin());
    found->series.push_back(static_cast<size_t>(&series - comparison.series.data()));
  }
}

void fill_labels(Comparison& comparison) {
  auto& all = comparison.series;
  for (size_t s = 0; s < all.front().settings.size(); ++s) {
    const auto& [name, value] = all.front().settings[s];
    const bool same = std::all_of(all.begin(), all.end(), [&, &value = value](const Series& each) {
      return each.settings[s].second == value || each.settings[s].second.empty();
    });
    if (!same && name != "codec") comparison.varied.push_back(name);
  }
  for (Series& series : all) {
    series.label = series.first().codec;
    for (size_t s = 0; s < series.settings.size(); ++s) {
      const bool needed = std::any_of(all.begin(), all.end(), [&](const Series& other) {
        return other.group == series.group && other.first().codec == series.first().codec &&
               other.settings[s] != series.settings[s];
      });
      if (needed && !series.settings[s].second.empty()) series.label += " \u00b7 " + shown(series.settings[s]);
    }
  }
}

// The place of `key` in a list that grows with every new one.
template <class Key>
size_t number_of(std::vector<Key>& known, const Key& key) {
  const auto found = std::find(known.begin(), known.end(), key);
  if (found != known.end()) return static_cast<size_t>(found - known.begin());
  known.push_back(key);
  return known.size() - 1;
}

// The colour and the mark of a series say its codec, and its dashes say what else tells it from others of that codec.
void fill_looks(Comparison& comparison) {
  const auto distinguishes = [&](const std::string& name) {
    const auto& varied = comparison.varied;
    return std::find(varied.begin(), varied.end(), name) != varied.end() &&
           !std::set<std::string>{"task", "model", "metric", "parameters"}.contains(name);  // those are the group's
  };
  for (RunGroup& group : comparison.groups) {
    std::vector<std::string> codecs;
    std::vector<std::vector<std::string>> variants;
    for (const size_t index : group.series) {
      Series& series = comparison.series[index];
      std::vector<std::string> variant;
      for (const auto& [name, value] : series.settings)
        if (distinguishes(name) && !value.empty()) variant.push_back(value);
      series.colour = number_of(codecs, series.first().canonical);
      series.variant = number_of(variants, variant);
    }
    group.variants = variants.size();
  }
}

void fill_reference(Series& series, const std::vector<Series>& all) {
  size_t most = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const Series& other = all[i];
    if (!is_fp32(other.first())) continue;
    if (other.group != series.group || other.first().workers != series.first().workers || other.partial) continue;
    size_t common = 1;
    for (size_t s = 0; s < series.settings.size(); ++s) common += other.settings[s] == series.settings[s];
    if (common <= most) continue;
    most = common;
    series.reference = i;
  }
  if (!series.reference) return;
  const Series& reference = all[*series.reference];
  const double target = target_of(reference.final_value.mean, series.first().metric);
  for (size_t i = 0; i < series.curve.size() && !series.target; ++i) {
    const double value = series.curve[i].value.mean;
    if (series.first().metric == Metric::accuracy ? value >= target : value <= target) series.target = i;
  }
  if (series.partial || &reference == &series) return;
  std::vector<double> differences;
  for (const Run* run : series.counted)
    for (const Run* other : reference.counted)
      if (run->seed == other->seed)
        differences.push_back(value_of(run->epochs.back(), run->metric) -
                              value_of(other->epochs.back(), other->metric));
  if (!differences.empty()) series.difference = statistic_of(differences);
}

}  // namespace

Statistic statistic_of(const std::vector<double>& values) {
  if (values.empty()) return {std::nan(""), 0, std::nan(""), std::nan(""), 0};
  Statistic s{0, 0, values.front(), values.front(), values.size()};
  const double n = static_cast<double>(values.size());
  for (double value : values) {
    s.mean += value / n;
    // One value that is not a number makes the whole statistic NaN. min and max would ignore it.
    s.least = std::isnan(value) || std::isnan(s.least) ? std::nan("") : std::min(s.least, value);
    s.most = std::isnan(value) || std::isnan(s.most) ? std::nan("") : std::max(s.most, value);
  }
  if (values.size() > 1) {
    double squares = 0;
    for (double value : values) squares += (value - s.mean) * (value - s.mean);
    s.deviation = std::sqrt(squares / (n - 1));
  }
  return s;
}

double target_of(double reference, Metric metric) {
  return metric == Metric::accuracy ? reference - 0.005 : reference * 1.01;
}

Comparison compare_runs(const std::vector<Run>& runs) {
  if (runs.empty()) throw Error(ErrorKind::usage, "there are no runs to report on", "runs");
  Comparison comparison;
  comparison.series = make_series(runs);
  for (Series& series : comparison.series) fill(series);
  fill_compute(comparison.series);
  for (Series& series : comparison.series) series.curve = curve_of(series);
  std::stable_sort(comparison.series.begin(), comparison.series.end(), [](const Series& a, const Series& b) {
    const auto key = [](const Series& s) {
      const Run& run = s.first();
      return std::make_tuple(run.task, run.model, name_of(run.metric), !is_fp32(run), std::isnan(s.bits) ? 0 : -s.bits);
    };
    return key(a) < key(b) || (key(a) == key(b) && a.settings < b.settings);
  });
  fill_groups(comparison);
  fill_labels(comparison);
  fill_looks(comparison);
  for (Series& series : comparison.series) fill_reference(series, comparison.series);
  return comparison;
}

}  // namespace gradwire::app
