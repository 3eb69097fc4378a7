// SPDX-License-Identifier: Apache-2.0
// Plots for papers: PNG at 300 dots per inch for a column of six inches, drawn by gnuplot. A codec has a colour
// (Okabe-Ito) and marks of its own and a collective its dashes, so that a grey print keeps the series apart. Bars range
// from the least to the greatest value over seeds.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "report/gnuplot.h"
#include "report/report_write.h"

namespace gradwire::app {
namespace {

constexpr double kPlotLink = 1;   // Gb/s
constexpr double kExact = 1e-10;  // an error below it is rounding and would only stretch the axis
constexpr const char* kColours[] = {"#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"};
constexpr const char* kDashes[] = {"1", "(12,5)", "(4,4)", "(14,4,3,4)", "(20,6)"};
constexpr int kMarks[] = {7, 5, 9, 13, 11, 6, 4, 8};

std::string head(int width, int height) {
  // noenhanced: an underscore in a name is an underscore.
  return fmt::format(
      "set terminal pngcairo noenhanced size {},{} font 'sans,15' fontscale 1.65 linewidth 2.2 pointscale 2 background "
      "rgb 'white'\n"
      "set encoding utf8\n"
      "set border 3 lw 0.8\nset tics nomirror out\nset grid lt 1 lc rgb '#dddddd' lw 0.6\n"
      "set key below reverse Left samplen 3.5 spacing 1.15 height 1\nset rmargin 4\n",
      width, height);
}

const char* colour(const Series& series) { return kColours[series.colour % std::size(kColours)]; }

// As in the page: colour and mark say the codec; dashes say the collective where there are several.
std::string style(const Series& series, const RunGroup& group) {
  const size_t dash = group.variants > 1 ? series.variant : series.colour;
  return fmt::format("lc rgb '{}' dt {} pt {} ps 1 lw 1.4", colour(series), kDashes[dash % std::size(kDashes)],
                     kMarks[series.colour % std::size(kMarks)]);
}

std::string title(const Series& series) { return gnuplot_text(series.label + (series.partial ? " (unfinished)" : "")); }

// The axis of values that are orders of magnitude apart is logarithmic and close around them, with labels at 1, 2 and 5
// of each decade. Values less than a factor of 4 apart get a linear axis.
std::string magnitudes(const std::vector<double>& values) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  if (*most / *least < 4) return "set format x '%g'\n";
  const double low = *least / 1.15, high = *most * 1.15;
  const bool few = high / low < 2000;
  std::string tics;
  for (int power = static_cast<int>(std::floor(std::log10(low))); power <= std::log10(high); ++power)
    for (const int step : {1, 2, 5})
      if (const double x = step * std::pow(10, power); x >= low && x <= high && (few || step == 1))
        tics += fmt::format("{}{:.6g}", tics.empty() ? "" : ", ", x);
  return fmt::format("set logscale x\nset format x '%g'\nset xrange [{}:{}]\nset xtics ({})\n", low, high, tics);
}

std::string whole_steps(const std::vector<double>& values) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return fmt::format("set xtics {}\n", std::max(1.0, std::ceil((*most - *least) / 10)));
}

// One line per series; empty if there is nothing to draw.
template <class X>
std::string curves(const Comparison& comparison, const RunGroup& group, const std::string& x_title, bool log, X x_of) {
  std::string data, plot;
  std::vector<double> xs;
  const double unit = group.metric == Metric::accuracy ? 100 : 1;
  for (size_t n = 0; n < group.series.size(); ++n) {
    const Series& series = comparison.series[group.series[n]];
    std::string block;
    for (const Point& point : series.curve) {
      const double x = x_of(point);
      if (!std::isfinite(point.value.mean) || (log && !(x > 0))) continue;
      xs.push_back(x);
      block +=
          fmt::format("{} {} {} {}\n", x, unit * point.value.mean, unit * point.value.least, unit * point.value.most);
    }
    if (block.empty()) continue;
    data += fmt::format("$s{} << EOD\n{}EOD\n", n, block);
    const size_t stride = (series.curve.size() + 11) / 12;  // about ten marks identify a line; more would cover it
    plot += fmt::format("{}$s{} using 1:2 with linespoints {} pi {} title {}", plot.empty() ? "plot " : ", ", n,
                        style(series, group), stride, title(series));
    if (series.counted.size() > 1)
      plot += fmt::format(", $s{} every {} using 1:3:(0):($4-$3) with vectors nohead lc rgb '{}' dt 1 lw 1 notitle", n,
                          stride, colour(series));
  }
  if (plot.empty()) return {};
  std::string text = head(1800, 1260) + data;
  text += fmt::format("set xlabel '{}'\nset ylabel 'test {}{}'\n", x_title, name_of(group.metric),
                      unit == 100 ? " (%)" : "");
  return text + (log ? magnitudes(xs) : whole_steps(xs)) + plot + "\n";
}

// One row per layer and one mark per codec. Bars would be wrong: on a logarithmic axis their length means nothing.
std::string layer_errors(const Comparison& comparison, const RunGroup& group) {
  std::vector<std::string> names;
  for (size_t index : group.series)
    for (const TensorError& tensor : comparison.series[index].layers.tensors)
      if (std::find(names.begin(), names.end(), tensor.name) == names.end()) names.push_back(tensor.name);
  std::string data, plot;
  std::vector<double> errors;
  const double spread = 0.5 / static_cast<double>(group.series.size());
  for (size_t n = 0; n < group.series.size(); ++n) {
    const Series& series = comparison.series[group.series[n]];
    std::string block;
    for (const TensorError& tensor : series.layers.tensors) {
      if (!(tensor.error > kExact && std::isfinite(tensor.error))) continue;
      const auto row = std::find(names.begin(), names.end(), tensor.name) - names.begin();
      const double shift = spread * (static_cast<double>(n) - 0.5 * static_cast<double>(group.series.size() - 1));
      errors.push_back(tensor.error);
      block += fmt::format("{} {}\n", tensor.error, static_cast<double>(row) + shift);
    }
    if (block.empty()) continue;
    data += fmt::format("$s{} << EOD\n{}EOD\n", n, block);
    plot += fmt::format("{}$s{} using 1:2 with points {} title {}", plot.empty() ? "plot " : ", ", n,
                        style(series, group), title(series));
  }
  if (plot.empty()) return {};
  std::string tics;
  for (size_t i = 0; i < names.size(); ++i) {
    std::string name = gnuplot_text(names[i].size() > 60 ? names[i].substr(0, 57) + "..." : names[i]);
    for (size_t at = 0; (at = name.find('%', at)) != std::string::npos; at += 2)
      name.insert(at, "%");  // a tic is a format
    tics += fmt::format("{}{} {}", i == 0 ? "" : ", ", name, i);
  }
  const int height = static_cast<int>(std::min<size_t>(500 + 62 * names.size(), 9000));
  return head(1800, height) + data + magnitudes(errors) +
         fmt::format(
             "set xlabel 'error of the mean gradient (squared, relative)'\n"
             "set yrange [{}:-0.6]\nset ytics ({}) scale 0\n",
             static_cast<double>(names.size()) - 0.4, tics) +
         plot + "\n";
}

// A component of a file name: letters, digits and a few harmless characters.
std::string slug(const std::string& text) {
  std::string result = text.substr(0, 40);
  for (char& c : result)
    if (!(c >= 'a' && c <= 'z') && !(c >= 'A' && c <= 'Z') && !(c >= '0' && c <= '9') && c != '-') c = '_';
  return result;
}

}  // namespace

std::vector<Plot> draw_plots(const Comparison& comparison) {
  std::vector<Plot> plots;
  std::set<std::string> taken;
  for (const RunGroup& group : comparison.groups) {
    std::string suffix;
    if (comparison.groups.size() > 1) {
      suffix = fmt::format("-{}-{}", slug(group.task), slug(group.model));
      while (!taken.insert(suffix).second) suffix += "_";
    }
    const std::string metric = name_of(group.metric);
    const auto add = [&](const std::string& name, const std::string& script) {
      if (!script.empty()) plots.push_back({name + suffix + ".png", gnuplot(script)});
    };
    add(metric + "-epochs", curves(comparison, group, "epoch", false, [](const Point& p) { return p.epoch; }));
    add(metric + "-bytes",
        curves(comparison, group, "megabytes sent by one worker", true, [](const Point& p) { return p.bytes / 1e6; }));
    add(metric + fmt::format("-time-{}Gbps", kPlotLink),
        curves(comparison, group, fmt::format("projected seconds on a link of {} Gb/s", kPlotLink), true,
               [](const Point& p) { return p.seconds_on(kPlotLink); }));
    add("error-layers", layer_errors(comparison, group));
  }
  return plots;
}

}  // namespace gradwire::app
