// SPDX-License-Identifier: Apache-2.0
// From runs to what is shown of them. A series consists of the runs that differ in nothing but the seed. A group
// consists of the series of one task and model, whose values may share a chart. Statistics are over the finished runs
// of a series. If none is finished, they are over all of its runs and the series is marked partial. The page and the
// plots draw the same numbers.
//
// The reference of a series is the fp32 series of its group and number of workers with the most settings in common.
// Differences from it are paired: the mean, over seeds that both have, of this run's final value minus that run's.
//
// Projected time on a link is compute + encode + decode (processor time of one worker) + the bytes that one worker
// sends over the link's bandwidth, nothing overlapped. Encode and decode are as measured. A model computes the same
// whatever the codec, and what was measured differs by the noise of the machine: compute is one number for all series
// that differ in nothing but codec, collective and rate, the median over their runs of the time of one step.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "report/report_run.h"

namespace gradwire::app {

inline constexpr double kLinks[] = {0.1, 1, 10, 25};  // Gb/s

struct Statistic {
  double mean = 0, deviation = 0, least = 0, most = 0;  // deviation: of the sample; 0 for one value
  size_t count = 0;
};
Statistic statistic_of(const std::vector<double>& values);

struct Point {  // the end of an epoch, or an evaluation within one
  double epoch = 0;
  Statistic value;
  double bytes = 0, busy = 0;  // means; busy: compute + encode + decode
  double steps = 0;
  double seconds_on(double gigabits) const { return busy + bytes * 8 / (gigabits * 1e9); }
};

// Seconds of compute in one step, over the runs of all series that compute the same.
struct ComputeTime {
  double median = 0, least = 0, most = 0;
  size_t runs = 0;
};

struct Series {
  std::string label;  // the codec, and the settings that distinguish it from others with the same codec
  std::vector<std::pair<std::string, std::string>> settings;  // name, value: all that the runs have in common
  std::vector<const Run*> runs;                               // by seed
  std::vector<const Run*> counted;                            // those that the statistics are over
  bool partial = false;
  size_t group = 0;
  size_t colour = 0;   // number of its codec within the group
  size_t variant = 0;  // number of its other settings within the group, such as the collective

  Statistic final_value;
  std::optional<size_t> reference;      // index of the fp32 series
  std::optional<Statistic> difference;  // over seeds in common
  double bits = 0, bytes = 0, skipped = 0;
  double ratio = 0;  // fp32 bytes / bytes sent, mean over runs
  // Gb/s of a link below which the bytes that the codec saves are worth its time: against fp32, and against a cast to
  // 16 bits that takes no time. Encoding, decoding and sending do not overlap. 0: never.
  double pays_fp32 = 0, pays_half = 0;
  RunSeconds seconds;
  ComputeTime compute;
  std::vector<Point> curve;
  std::optional<size_t> target;                             // index into curve: where target_of(reference) is reached
  std::vector<std::pair<uint64_t, double>> bits_over_time;  // drawn: at most a few hundred points
  double bits_least = 0, bits_most = 0;                     // over all steps
  bool bits_change = false;
  Measurement layers;  // the last one, means

  const Run& first() const { return *runs.front(); }
};

struct RunGroup {
  std::string task, model;
  Metric metric = Metric::accuracy;
  std::vector<size_t> series;
  size_t variants = 1;  // above 1, dashes tell them apart; otherwise dashes tell codecs apart, as colours do
};

struct Comparison {
  std::vector<Series> series;  // by group; fp32 first, then by falling bits
  std::vector<RunGroup> groups;
  std::vector<std::string> varied;  // settings besides the codec that are not the same in all series
};

// `runs` must outlive the comparison.
Comparison compare_runs(const std::vector<Run>& runs);

// What a series must reach to count as equal to its reference: 0.5 points of accuracy below it, or 1 % of loss above
// it.
double target_of(double reference, Metric metric);

}  // namespace gradwire::app
