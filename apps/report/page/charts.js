// SPDX-License-Identifier: Apache-2.0
// The charts. Each is a function from what is shown now to a description: the finding in words (a caption, and what a
// screen reader says of the picture), the numbers as a table, and what Chart.js draws. A change of anything draws all
// of them anew.

const hasCharts = typeof Chart !== "undefined";
const EXACT = 1e-10;   // an error below it is rounding and would only stretch the axis
const MOST_ROWS = 24;  // of a chart of levels
const narrow = () => innerWidth < 640;

function shorten(text, most = narrow() ? 16 : 34) {
  return text.length <= most ? text :
                               `${text.slice(0, Math.ceil(most / 2) - 1)}\u2026${text.slice(-Math.floor(most / 2))}`;
}

// Axes ----------------------------------------------------------------------------------------------------------------

const axis = (title, more = {}) => ({
  title: {display: title !== "", text: title, color: theme("--muted")},
  grid: {color: theme("--grid"), borderColor: theme("--line")},
  ...more,
  ticks: {color: theme("--muted"), maxRotation: 0, ...more.ticks},
});
// An axis for values above zero that are orders of magnitude apart: logarithmic, close around them, with 1, 2 and 5 of
// each decade named, or the decades alone where that would be many. What is less than a factor of 4 apart gets a plain
// axis.
function magnitudes(title, values, text) {
  const least = Math.min(...values), most = Math.max(...values);
  if (!(most / least >= 4)) return axis(title, {type: "linear", ticks: {callback: text}});
  const min = least / 1.15, max = most * 1.15;
  const named = (steps) => {
    const ticks = [];
    for (let power = Math.floor(Math.log10(min)); power <= Math.log10(max); ++power)
      for (const step of steps) ticks.push(Number(`${step}e${power}`));
    return ticks.filter((x) => x >= min && x <= max).map((value) => ({value}));
  };
  const fine = named([1, 2, 5]);
  const ticks = fine.length > (narrow() ? 5 : 9) ? named([1]) : fine;
  return axis(`${title} (logarithmic)`, {
    type: "logarithmic",
    min,
    max,
    afterBuildTicks: (scale) => {
      scale.ticks = ticks;
    },
    ticks: {callback: text, autoSkipPadding: 8}
  });
}
const plain = (x) =>
    (x >= 1        ? count(Number(x.toPrecision(3))) :
         x >= 1e-4 ? String(Number(x.toPrecision(2))) :
                     minus(x.toExponential()));
function bytesTick(n) {
  const power = Math.max(0, Math.min(5, Math.floor(Math.log10(n) / 3 + 1e-9)));
  return `${Number((n / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB", "PB"][power]}`;
}
const positive = (list, xOf) => list.flatMap((series) => series.curve.map(xOf)).filter((x) => x > 0);
const valueAxis = (metric) => axis(`test ${metric}`, {
  ticks: {callback: (y) => (isPercent(metric) ? `${Number((100 * y).toFixed(1))} %` : Number(y.toPrecision(4)))},
});
// Rows with names, the first on top.
const rowAxis = (names) => axis("", {
  type: "linear",
  min: -0.5,
  max: names.length - 0.5,
  reverse: true,
  afterBuildTicks: (scale) => {
    scale.ticks = names.map((_, value) => ({value}));
  },
  ticks: {autoSkip: false, color: theme("--text"), callback: (row) => shorten(names[row] ?? "")},
});

function options(scales, tooltip, more = {}) {
  return {
    responsive: true,
    maintainAspectRatio: false,
    animation: false,
    scales,
    plugins: {
      legend: {display: false},
      tooltip: {
        backgroundColor: theme("--text"),
        titleColor: theme("--surface"),
        bodyColor: theme("--surface"),
        boxPadding: 4,
        usePointStyle: true,
        filter: (item) => !item.dataset.band,
        ...tooltip
      },
    },
    ...more,
  };
}

const styled = (series) => {
  const {colour, dash, mark} = look(series);
  return {
    series: series.index,
    label: series.label,
    borderColor: colour,
    backgroundColor: colour,
    borderDash: dash,
    borderWidth: 2,
    pointStyle: mark,
    pointRadius: 4,
    pointHoverRadius: 6,
    pointBorderWidth: mark === "cross" || mark === "star" ? 2 : 0,
    tension: 0
  };
};

// A mean line for each series and, where there are several seeds, a band from the least to the most of them.
function lines(list, xOf, log) {
  const datasets = [];
  for (const series of list) {
    const points = series.curve.filter((point) => known(point.value.mean) && (!log || xOf(point) > 0));
    const along = (of) => points.map((point) => ({x: xOf(point), y: point.value[of], point}));
    // About ten marks a line are enough to tell it by; each series starts elsewhere, so that they do not cover each
    // other.
    const stride = Math.ceil(points.length / 12);
    const marked = (_, i) => (i === points.length - 1 || i % stride === series.place % stride ? 4 : 0);
    datasets.push({...styled(series), data: along("mean"), order: 0, pointRadius: points.map(marked)});
    if (series.final.count < 2) continue;
    const band = {
      band: true,
      series: series.index,
      label: series.label,
      pointRadius: 0,
      pointHoverRadius: 0,
      pointHitRadius: 0,
      borderWidth: 0,
      order: 1
    };
    datasets.push({...band, data: along("least"), fill: false});
    datasets.push({...band, data: along("most"), fill: "-1", backgroundColor: look(series).colour + "2b"});
  }
  return {datasets};
}

function rangeText(statistic, metric) {
  const mean = valueText(statistic.mean, metric);
  if (statistic.count < 2 || !known(statistic.mean)) return mean;
  const scaled = (x) => (unit(metric) * x).toFixed(digits(metric));
  return `${mean} (${scaled(statistic.least)} to ${scaled(statistic.most)})`;
}

const ranked = (list) => list.filter((series) => known(series.final.mean))
                             .sort((a, b) => (better(a.metric, a.final.mean, b.final.mean) ? -1 : 1));
const each = (list, text) => list.map((series) => `${series.label} ${text(series)}`).join(", ");

// Accuracy against something ------------------------------------------------------------------------------------------

const epochText = (epoch) => String(Number(epoch.toFixed(2)));

function curveChart(list, {xOf, scale, log, caption, columns, finding, label, mode}) {
  const {metric} = group();
  const epochs = [...new Set(list.flatMap((series) => series.curve.map((point) => point.epoch)))].sort((a, b) => a - b);
  const rows = epochs.map((epoch) => [epochText(epoch), ...list.map((series) => {
                            const point = series.curve.find((other) => other.epoch === epoch);
                            return point ? columns(point) : NONE;
                          })]);
  return {
    finding,
    label,
    numbers: table(caption, [{name: "Epoch"}, ...list.map((series) => ({name: series.label}))], rows),
    config: {
      type: "line",
      data: lines(list, xOf, log),
      options: options(
          {x: scale, y: valueAxis(metric)}, {
            callbacks: {
              title: (items) => (items.length ? `Epoch ${epochText(items[0].raw.point.epoch)}` : ""),
              label: (item) => `${item.dataset.label}: ${columns(item.raw.point)}`,
            },
          },
          {interaction: mode}),
    },
  };
}

function epochsChart() {
  const {metric} = group();
  const list = visible().filter((series) => series.curve.length);
  if (!list.length) return null;
  const order = ranked(list);
  const ends = `At the end: ${each(order, (series) => valueText(series.final.mean, metric))}.`;
  const finding = order.length > 1 ?
      `Best at the end: ${order[0].label}, ${valueText(order[0].final.mean, metric)}; last: ${
          order[order.length - 1].label}, ${valueText(order[order.length - 1].final.mean, metric)}.` +
          (list.some((series) => series.final.count > 1) ? " Bands: from the least to the most of the seeds." : "") :
      ends;
  return curveChart(list, {
    xOf: (point) => point.epoch,
    log: false,
    caption: `Test ${metric} at each evaluation: mean (least to most of the seeds)`,
    finding,
    scale: axis("epoch", {type: "linear", ticks: {precision: 0}}),
    label: `Line chart of test ${metric} by epoch. ${ends}`,
    columns: (point) => rangeText(point.value, metric),
    mode: {mode: "index", intersect: false},
  });
}

function bytesChart() {
  const {metric} = group();
  const list = visible().filter((series) => series.curve.some((point) => point.bytes > 0));
  if (!list.length) return null;
  const order = [...list].sort((a, b) => a.bytes - b.bytes);
  const words = each(order, (series) => `${bytesText(series.bytes)} for ${valueText(series.final.mean, metric)}`);
  const most = order[order.length - 1];
  const finding = order.length > 1 ?
      `Sent by one worker in all: least by ${order[0].label}, ${bytesText(order[0].bytes)}; most by ${most.label}, ${
          bytesText(most.bytes)}, ${three(most.bytes / order[0].bytes)} times as much.` :
      `Sent by one worker in all: ${words}.`;
  return curveChart(list, {
    xOf: (point) => point.bytes,
    log: true,
    caption: `Test ${metric} and bytes sent by one worker up to each evaluation`,
    finding,
    scale: magnitudes("sent by one worker", positive(list, (point) => point.bytes), bytesTick),
    label: `Line chart of test ${metric} by bytes sent. In all: ${words}.`,
    columns: (point) => `${valueText(point.value.mean, metric)} at ${bytesText(point.bytes)}`,
    mode: {mode: "nearest", intersect: false},
  });
}

function timeChart() {
  const {metric} = group();
  const {link} = shown;
  const list = visible().filter((series) => series.curve.length);
  if (!list.length) return null;
  const speed = linkText(data.links[link]);
  const order = [...list].filter((series) => !series.partial).sort((a, b) => finishOn(a, link) - finishOn(b, link));
  const words = each(order, (series) => secondsText(finishOn(series, link)));
  const last = order[order.length - 1];
  const finding = order.length > 1 ?
      `At ${speed} ${order[0].label} would finish first, after ${secondsText(finishOn(order[0], link))}, and ${
          last.label} last, after ${secondsText(finishOn(last, link))}.` :
      `At ${speed}: ${words || "nothing is finished"}.`;
  return curveChart(list, {
    xOf: (point) => point.seconds[link],
    log: true,
    caption: `Test ${metric} and projected time up to each evaluation at ${speed}`,
    finding,
    scale: magnitudes(`projected seconds at ${speed}`, positive(list, (point) => point.seconds[link]), plain),
    label: `Line chart of test ${metric} by projected time at ${speed}. To finish: ${words}.`,
    columns: (point) => `${valueText(point.value.mean, metric)} at ${secondsText(point.seconds[link])}`,
    mode: {mode: "nearest", intersect: false},
  });
}

// Time, bits, layers, levels ------------------------------------------------------------------------------------------

const PART_NAMES = ["compute", "encode", "wait", "decode"];

function splitChart() {
  const list = visible().filter((series) => series.curve.length);
  if (!list.length) return null;
  const colours = palette(PARTS);
  const busy = (series) => series.split.reduce((a, b) => a + b, 0);
  const share = (series) =>
      (busy(series) > 0 ? `${(100 * (series.split[1] + series.split[3]) / busy(series)).toFixed(1)} %` : NONE);
  const order = [...list].sort((a, b) => parseFloat(share(a)) - parseFloat(share(b)));
  const finding = `Encoding and decoding take ${
          [...new Set([order[0], order[order.length - 1]])]
              .map((series) => `${share(series)} (${series.label})`)
              .join(" to ")} of a worker\u2019s time.`;
  return {
    finding,
    label: `Stacked bars of a worker\u2019s time. ${
        each(list, (series) => PART_NAMES.map((name, i) => `${name} ${secondsText(series.split[i])}`).join(" "))}.`,
    height: 70 + 44 * list.length,
    parts: PART_NAMES.map((name, i) => [name, colours[i]]),
    numbers: table(
        "A worker\u2019s time over the whole run",
        [{name: "Codec"}, ...PART_NAMES.map((name) => ({name})), {name: "wall clock"}],
        list.map((series) => [named(series), ...series.split.map(secondsText), secondsText(series.wall)])),
    config: {
      type: "bar",
      data: {
        labels: list.map((series) => shorten(series.label, narrow() ? 16 : 24)),
        datasets: PART_NAMES.map(
            (label, i) => (
                {label, data: list.map((series) => series.split[i]), backgroundColor: colours[i], maxBarThickness: 26}))
      },
      options: options(
          {
            x: axis("seconds", {stacked: true}),
            y: axis("", {stacked: true, ticks: {color: theme("--text"), autoSkip: false}, grid: {display: false}})
          },
          {usePointStyle: false, callbacks: {label: (item) => `${item.dataset.label}: ${secondsText(item.raw)}`}},
          {indexAxis: "y", interaction: {mode: "index", axis: "y", intersect: false}}),
    },
  };
}

// A codec whose bits stay the same is said in words and not drawn.
function bitsChart() {
  const recorded = visible().filter((series) => series.bits_over_time.length);
  if (!recorded.length) return null;
  const list = recorded.filter((series) => series.bits_change);
  const constant = recorded.filter((series) => !series.bits_change);
  const rows = constant.map((series) => [named(series), bitsText(series.bits)]);
  const still = table("Codecs whose bits per element stay the same", [{name: "Codec"}, {name: "Bits"}], rows);
  if (!list.length)
    return {finding: "No codec that is shown changes its bits per element during the training.", numbers: still};
  const words = each(
      list,
      (series) =>
          `between ${bitsText(series.bits_least)} and ${bitsText(series.bits_most)}, mean ${bitsText(series.bits)}`);
  const steps =
      [...new Set(list.flatMap((series) => series.bits_over_time.map(([step]) => step)))].sort((a, b) => a - b);
  const at = list.map((series) => new Map(series.bits_over_time));
  return {
    finding: `${words}.${constant.length ? " Codecs whose bits stay the same are not drawn." : ""}`,
    label: `Line chart of bits per element by step. ${words}.`,
    numbers: table(
        "Bits per element by step", [{name: "Step"}, ...list.map((series) => ({name: series.label}))],
        steps.map((step) => [count(step), ...at.map((bits) => bitsText(bits.get(step)))])),
    config: {
      type: "line",
      data: {
        datasets:
            list.map((series) => ({
                       ...styled(series),
                       stepped: true,
                       ...(series.bits_over_time.length > 40 ? {pointRadius: 0, borderDash: []} : {pointRadius: 3}),
                       data: series.bits_over_time.map(([x, y]) => ({x, y}))
                     }))
      },
      options: options(
          {x: axis("step", {type: "linear", ticks: {callback: count}}), y: axis("bits per element", {suggestedMin: 0})},
          {
            callbacks: {
              title: (items) => `Step ${count(items[0].raw.x)}`,
              label: (item) => `${item.dataset.label}: ${bitsText(item.raw.y)} bits`
            }
          },
          {interaction: {mode: "nearest", axis: "x", intersect: false}}),
    },
  };
}

const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b);
  return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
};

// One row a layer, one mark a codec. Marks and not bars: on a logarithmic axis the length of a bar means nothing.
function layersChart() {
  const list = visible().filter((series) => series.layers.tensors.length);
  if (!list.length) return null;
  const names = [...new Set(list.flatMap((series) => series.layers.tensors.map((tensor) => tensor.name)))];
  const elements =
      new Map(list.flatMap((series) => series.layers.tensors.map((tensor) => [tensor.name, tensor.elements])));
  const of = list.map((series) => new Map(series.layers.tensors.map((tensor) => [tensor.name, tensor])));
  const middle = list.map((series) => median(series.layers.tensors.map((tensor) => tensor.error).filter(known)));
  const order = list.map((_, i) => i).sort((a, b) => middle[a] - middle[b]);
  const words =
      order.map((i) => `${list[i].label} ${middle[i] < EXACT ? "exact up to rounding" : errorText(middle[i])}`)
          .join(", ");
  const shift = (i) => (list.length > 1 ? 0.56 * (i / (list.length - 1) - 0.5) : 0);
  return {
    finding: `Median over layers: ${words}.`,
    label: `Marks on a logarithmic axis: error of each layer with each codec. Median over layers: ${words}.`,
    height: 70 + names.length * (names.length > 16 ? 24 : Math.max(26, 7 * list.length)),
    numbers: table(
        "Error (squared, relative) and, in brackets, cosine with the exact mean",
        [{name: "Layer"}, {name: "Elements"}, ...list.map((series) => ({name: series.label}))],
        names.map((name) => [name, count(elements.get(name)), ...of.map((tensors) => {
                    const tensor = tensors.get(name);
                    return tensor ? `${errorText(tensor.error)} (${
                                        known(tensor.cosine) ? minus(tensor.cosine.toFixed(4)) : NONE})` :
                                    NONE;
                  })])),
    config:
        {
          type: "scatter",
          data: {
            datasets: list.map(
                (series, i) => ({
                  ...styled(series),
                  pointRadius: 5,
                  data: series.layers.tensors.filter((tensor) => tensor.error > EXACT)
                            .map((tensor) => ({x: tensor.error, y: names.indexOf(tensor.name) + shift(i), tensor}))
                }))
          },
          options:
              options(
                  {
                    x: magnitudes(
                        "error (squared, relative)",
                        list.flatMap((series) => series.layers.tensors.map((tensor) => tensor.error))
                            .filter((x) => x > EXACT),
                        plain),
                    y: rowAxis(names)
                  },
                  {
                    callbacks: {
                      label: (item) =>
                          `${item.dataset.label}, ${item.raw.tensor.name}: ${errorText(item.raw.tensor.error)}`
                    },
                  },
                  {interaction: {mode: "nearest", intersect: true}}),
        },
  };
}

// The levels of each table of a series as marks on a ruler; where there are many tables, those of the last step.
function levelsChart(series) {
  let tables = series.tables.filter((each) => each.levels);
  const all = tables.length;
  if (tables.length > MOST_ROWS)
    tables = tables.filter((each) => each.step === tables[tables.length - 1].step).slice(0, MOST_ROWS);
  // A row is named by what tells it from the others.
  const describe = [(each) => `step ${count(each.step)}`, (each) => each.direction, (each) => tensorsText(each.tensors)];
  const telling = describe.filter(
      (of, i) => i === 0 ? new Set(tables.map(of)).size > 1 || tables.length === 1 : new Set(tables.map(of)).size > 1);
  const names = tables.map((each) => telling.map((of) => of(each)).join(", "));
  const written = (levels) => levels.map((level) => minus(String(Number(level.toPrecision(3))))).join(" ");
  const last = tables[tables.length - 1];
  return {
    finding: `${last.levels.length} levels at step ${count(last.step)}: ${written(last.levels)}.${
        tables.length < all ? ` ${tables.length} of ${all} tables are drawn.` : ""}`,
    label: `Positions of the levels of ${series.label}. At step ${count(last.step)}: ${written(last.levels)}.`,
    height: 70 + 30 * tables.length,
    numbers: table(
        `Levels of ${series.label}`, [{name: "Table"}, {name: "Levels", text: true}],
        tables.map((each, i) => [names[i], written(each.levels)])),
    config: {
      type: "scatter",
      data: {
        datasets: [{
          series: series.index,
          label: series.label,
          borderColor: look(series).colour,
          pointStyle: "line",
          rotation: 90,
          pointRadius: 9,
          pointHoverRadius: 11,
          pointBorderWidth: 3,
          data: tables.flatMap((each, y) => each.levels.map((x) => ({x, y})))
        }]
      },
      options: options(
          {
            x: axis(
                "level, in units of the bucket\u2019s scale",
                {ticks: {callback: (x) => minus(String(Number(x.toPrecision(3))))}}),
            y: rowAxis(names)
          },
          {callbacks: {label: (item) => `${names[item.raw.y]}: ${minus(String(Number(item.raw.x.toPrecision(4))))}`}}),
    },
  };
}
