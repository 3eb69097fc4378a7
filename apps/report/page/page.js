// SPDX-License-Identifier: Apache-2.0
// The page's program, in four files: this one has the data, how numbers are written, what is shown now (group, link,
// visible series) and the look of a series; tables.js has everything that is text; charts.js what is in each chart; draw.js
// draws, listens and starts it all.
//
// What users wrote reaches the page through textContent and attributes that hold text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
data.series.forEach((series, index) => {
  series.index = index;
  series.place = data.series.slice(0, index).filter((other) => other.group === series.group).length;
  series.metric = data.groups[series.group].metric;
});

const shown = {
  group: 0,
  link: 1,
  hidden: new Set()
};  // link: index into data.links
const group = () => data.groups[shown.group];
const inGroup = () => data.series.filter((series) => series.group === shown.group);
const visible = () => inGroup().filter((series) => !shown.hidden.has(series.index));

// An element: el("td", {class: "text"}, "words", child, ...). Strings become text.
function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (value !== undefined) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// Numbers as people read them -----------------------------------------------------------------------------------------

const NONE = "\u2013";
const known = (x) => typeof x === "number" && Number.isFinite(x);
const minus = (text) => text.replace("-", "\u2212");
const count = (n) => Number(n).toLocaleString("en-US");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const listed = (words) =>
    words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}`;

const isPercent = (metric) => metric === "accuracy";
const unit = (metric) => (isPercent(metric) ? 100 : 1);
const digits = (metric) => (isPercent(metric) ? 2 : metric === "loss" ? 4 : 2);
const better = (metric, a, b) => (isPercent(metric) ? a > b : a < b);
const closeTo = (metric) => (isPercent(metric) ? "0.5 points" : "1 %");

function valueText(value, metric) {
  if (!known(value)) return "not a number";
  return (unit(metric) * value).toFixed(digits(metric)) + (isPercent(metric) ? "\u00a0%" : "");
}
function spreadText(statistic, metric) {
  if (statistic.count === 0) return NONE;
  if (statistic.count < 2 || !known(statistic.mean)) return valueText(statistic.mean, metric);
  const scaled = (x) => (unit(metric) * x).toFixed(digits(metric));
  return `${scaled(statistic.mean)} \u00b1 ${scaled(statistic.deviation)}${isPercent(metric) ? "\u00a0%" : ""}`;
}
function signedText(value, metric) {
  if (!known(value)) return NONE;
  const text = (unit(metric) * value).toFixed(digits(metric));
  return Number(text) === 0 ? (0).toFixed(digits(metric)) : minus(value > 0 ? "+" + text : text);
}
function three(x) {  // three digits that mean something, without exponents
  if (x >= 100) return count(Math.round(x));
  return x >= 10 ? x.toFixed(1) : x.toFixed(2);
}
function bytesText(n) {
  if (!known(n)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let power = 0;
  while (n >= 999.5 && power + 1 < units.length) {
    n /= 1000;
    ++power;
  }
  return `${power === 0 ? Math.round(n) : three(n)}\u00a0${units[power]}`;
}
function secondsText(s) {
  if (!known(s)) return NONE;
  if (s < 1) return `${(1000 * s).toPrecision(3)}\u00a0ms`;
  if (s < 59.95) return `${s.toFixed(1)}\u00a0s`;
  const two = (n) => String(n).padStart(2, "0");
  const whole = Math.round(s);
  if (whole < 3600) return `${Math.floor(whole / 60)}\u00a0min\u00a0${two(whole % 60)}\u00a0s`;
  return `${count(Math.floor(whole / 3600))}\u00a0h\u00a0${two(Math.floor(whole % 3600 / 60))}\u00a0min`;
}
const bitsText = (bits) => (known(bits) ? bits.toFixed(2) : NONE);
const paysText = (gbps) => (gbps > 0 ? three(gbps) : "never");
const ratioText = (ratio) => (known(ratio) ? `${three(ratio)}\u00d7` : NONE);
const linkText = (gigabits) => (gigabits < 1 ? `${1000 * gigabits}\u00a0Mb/s` : `${gigabits}\u00a0Gb/s`);
function errorText(error) {
  if (!known(error)) return "not a number";
  if (error === 0) return "0";
  return error >= 0.001 && error < 1000 ? error.toPrecision(3) : minus(error.toExponential(1));
}

// The look of a series: a colour of Okabe and Ito and a mark for its codec, and dashes for what else tells it from
// others of that codec, such as the collective. Where nothing does, dashes help to tell codecs apart.

const dark = matchMedia("(prefers-color-scheme: dark)");
let printing = false;
const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const PALETTES = {
  light: ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"],
  dark: ["#FFFFFF", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#F0E442"],
};
const PARTS = {
  light: ["#0072B2", "#E69F00", "#B9BEC6", "#009E73"],
  dark: ["#56B4E9", "#E69F00", "#6A727D", "#00B586"]
};
const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [14, 4]];
const MARKS = ["circle", "rect", "triangle", "rectRot", "cross", "star"];
const palette = (kind) => kind[dark.matches && !printing ? "dark" : "light"];
const look = (series) => ({
  colour: palette(PALETTES)[series.colour % PALETTES.light.length],
  dash: DASHES[(data.groups[series.group].variants > 1 ? series.variant : series.colour) % DASHES.length],
  mark: MARKS[series.colour % MARKS.length],
});

// The look as a picture of 30 x 14: a piece of line and its mark.
function keyOf(series) {
  const {colour, dash, mark} = look(series);
  const shape = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const picture = shape("svg", {viewBox: "0 0 30 14", "aria-hidden": "true", class: "key"});
  picture.append(
      shape("path", {d: "M0 7H30", stroke: colour, "stroke-width": 2, "stroke-dasharray": dash.join(" ") || "none"}));
  const filled = {fill: colour, stroke: "none"};
  const drawn = {stroke: colour, "stroke-width": 2, fill: "none"};
  const marks = {
    circle: () => shape("circle", {cx: 15, cy: 7, r: 4, ...filled}),
    rect: () => shape("path", {d: "M11 3h8v8h-8z", ...filled}),
    triangle: () => shape("path", {d: "M15 2l5 9h-10z", ...filled}),
    rectRot: () => shape("path", {d: "M15 1.5l5.5 5.5-5.5 5.5-5.5-5.5z", ...filled}),
    cross: () => shape("path", {d: "M15 2v10M10 7h10", ...drawn}),
    star: () => shape("path", {d: "M15 2v10M10.7 4.5l8.6 5M10.7 9.5l8.6-5", ...drawn}),
  };
  picture.append(marks[mark]());
  return picture;
}
