// SPDX-License-Identifier: Apache-2.0
// Asks for the status once a second and writes it into the page. Whatever comes from the server is text and is set as
// textContent: a worker may call itself anything. Rows and lines are kept and only rewritten where they changed, so that
// a selection in the table survives the next second.
"use strict";
const id = (name) => document.getElementById(name);
const finite = (value) => typeof value === "number" && Number.isFinite(value);
const whole = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
const count = (value) => finite(value) ? whole.format(value) : "\u2013";
const number = (value, digits = 4) => finite(value) ? String(Number(value.toPrecision(digits))) : "\u2013";
const bytes = (value) => {
  if (!finite(value)) return "\u2013";
  let unit = 0;
  for (; value >= 999.5 && unit < 5; ++unit) value /= 1000;
  return (unit ? Number(value.toPrecision(3)) : value) + "\u00a0" + ["B", "kB", "MB", "GB", "TB", "PB"][unit];
};
const seconds = (value) => {
  if (!finite(value)) return "\u2013";
  if (value < 10) return value.toFixed(1) + "\u00a0s";
  if (value < 120) return value.toFixed(0) + "\u00a0s";
  const minutes = Math.floor(value / 60);
  if (minutes < 120) return minutes + "\u00a0min";
  return minutes < 2880 ? `${Math.floor(minutes / 60)}\u00a0h ${minutes % 60}\u00a0min` : `${Math.floor(minutes / 1440)}\u00a0d ${Math.floor(minutes / 60) % 24}\u00a0h`;
};
const set = (element, text) => { if (element.textContent !== text) element.textContent = text; };

// Makes the children of a list as many as there are items, and fills each.
function each(list, items, make, fill) {
  while (list.children.length > items.length) list.lastElementChild.remove();
  while (list.children.length < items.length) list.append(make());
  items.forEach((item, i) => fill(list.children[i], item));
}
function element(name, children = [], classes = "") {
  const made = document.createElement(name);
  made.append(...children);
  if (classes) made.className = classes;
  return made;
}

// [name, figure, words below, whether it is bad]
const highlights = (items) => each(id("highlights"), items, () => element("div", [element("dt"), element("dd", [], "figure"), element("dd")]), (box, [name, figure, words, bad]) => {
  [name, figure, words].forEach((text, i) => set(box.children[i], text));
  box.classList.toggle("bad", Boolean(bad));
});
// [name, words, whether it is bad]
const lines = (where, items) => each(id(where), items, () => element("div", [element("dt"), element("dd")]), (line, [name, words, bad]) => {
  set(line.children[0], name);
  set(line.children[1], words);
  line.classList.toggle("bad", Boolean(bad));
});

function workers(list) {
  const here = (worker) => worker.state === "present" || worker.state === "lagging";
  const sorted = [...list.filter(here), ...list.filter((worker) => !here(worker))];
  id("no-workers").hidden = sorted.length > 0;
  id("workers-box").hidden = sorted.length === 0;
  const make = () => {
    const name = element("th");
    name.scope = "row";
    return element("tr", [name, ...Array.from({length: 10}, (_, i) => element("td", [], i === 0 || i === 9 ? "text" : ""))]);
  };
  each(id("workers"), sorted, make, (row, worker) => {
    row.className = here(worker) ? worker.state : "away";
    row.cells[0].title = `${worker.name} (${worker.id})`;
    [worker.name || worker.id, worker.state, count(worker.step), count(worker.staleness), seconds(worker.lag_s), count(worker.late), count(worker.updates),
     number(worker.loss), bytes(worker.bytes_up), bytes(worker.bytes_down), worker.peer].forEach((text, i) => set(row.cells[i], String(text ?? "\u2013")));
  });
  edge();
}

// Columns beyond the edge of the box are announced above it, and the edge is shaded.
function edge() {
  const box = id("workers-box"), beyond = box.scrollWidth - box.clientWidth;
  id("beyond").hidden = box.hidden || beyond <= 1;
  box.classList.toggle("more", beyond - box.scrollLeft > 1);
}
new ResizeObserver(edge).observe(id("workers-box"));
id("workers-box").addEventListener("scroll", edge);

// Loss ----------------------------------------------------------------------------------------------------------------
let points = [], pointed = null;  // pointed: where the pointer is, in pixels from the left
function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
// Round numbers from low to high, about `wanted` of them.
function ticks(low, high, wanted) {
  const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= raw) ?? 10);
  const from = Math.ceil(low / step - 1e-9), made = [];
  for (let i = from; i * step <= high + step * 1e-9 && made.length < 50; ++i) made.push(Number((i * step).toPrecision(12)));
  return made;
}
function curve() {
  const box = id("curve"), drawn = points.filter(([, loss]) => finite(loss));
  box.replaceChildren();
  box.parentElement.hidden = !drawn.length;
  if (!drawn.length) return set(id("reading"), "No loss was reported yet.");
  const {clientWidth: width, clientHeight: height} = box;
  const losses = drawn.map(([, loss]) => loss), first = drawn[0][0], last = Math.max(drawn.at(-1)[0], first + 1);
  let low = Math.min(...losses), high = Math.max(...losses);
  const room = (high - low || Math.abs(high) || 1) * .05;
  low -= room, high += room;
  const left = 56, right = 12, top = 8, bottom = 26;
  const x = (step) => left + (step - first) / (last - first) * (width - left - right);
  const y = (loss) => top + (high - loss) / (high - low) * (height - top - bottom);
  for (const tick of ticks(low, high, 5)) {
    box.append(svg("line", {class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick)}));
    box.append(svg("text", {x: left - 8, y: y(tick) + 4, "text-anchor": "end"}, number(tick)));
  }
  for (const tick of ticks(first, last, Math.max(3, width / 160)).filter(Number.isInteger))
    box.append(svg("text", {x: x(tick), y: height - 6, "text-anchor": x(tick) > width - 40 ? "end" : "middle"}, count(tick)));
  let path = "", pen = "M";
  for (const [step, loss] of points) {  // a step without a loss leaves a gap
    if (finite(loss)) path += `${pen}${x(step).toFixed(1)} ${y(loss).toFixed(1)}`;
    pen = finite(loss) ? "L" : "M";
  }
  box.append(svg("path", {class: "line", d: path}));
  const mark = pointed === null ? drawn.at(-1) : drawn.reduce((best, point) => Math.abs(x(point[0]) - pointed) < Math.abs(x(best[0]) - pointed) ? point : best);
  box.append(svg("circle", {class: "mark", cx: x(mark[0]), cy: y(mark[1]), r: 4}));
  set(id("reading"), `Step ${count(mark[0])}: ${number(mark[1])}` + (pointed === null ? ` (from ${number(losses[0])} at step ${count(first)}; lowest ${number(Math.min(...losses))})` : ""));
  box.setAttribute("aria-label", `Loss from ${number(losses[0])} at step ${count(first)} to ${number(losses.at(-1))} at step ${count(drawn.at(-1)[0])}.`);
}
id("curve").addEventListener("pointermove", (event) => { pointed = event.offsetX; curve(); });
id("curve").addEventListener("pointerleave", () => { pointed = null; curve(); });
new ResizeObserver(curve).observe(id("curve"));

// The whole page ------------------------------------------------------------------------------------------------------
function show(s) {
  const {workers: who = {}, bytes: sent = {}, staleness = {}, ledger = {}, refused = {}, checkpoint = {}, model = {}} = s;
  const off = finite(ledger.relative) && ledger.relative > 1e-6, late = staleness.bound === null || staleness.bound === undefined ? "" : `, bound ${count(staleness.bound)}`;
  const ratio = (ours, full) => finite(ours) && full > 0 ? `${(ours / full).toFixed(3)} of fp32` : "nothing yet";
  set(id("state"), s.state ?? "unknown state");
  set(id("summary"), `${s.mode}, up ${seconds(s.uptime_s)}. Workers send ${s.up}; the server sends ${s.send} as ${s.down}.`);
  document.title = `step ${count(s.step)}, ${s.state} \u00b7 gradwire`;
  highlights([
    ["step", count(s.step), finite(s.durable_step) ? `on disk: ${count(s.durable_step)}` : "none on disk"],
    ["steps per second", number(s.steps_per_s, 3), "over the last minute"],
    ["loss", number(s.loss), "mean of the workers"],
    ["workers", count(who.present), `${count(who.min)} needed, ${count(who.max)} at most`, who.present < who.min],
    ["bytes up", bytes(sent.up), ratio(sent.up, sent.fp32_up)],
    ["bytes down", bytes(sent.down), ratio(sent.down, sent.fp32_down)],
    ["staleness", number(staleness.mean, 3), `largest ${count(staleness.max)}${late}`],
    ["ledger", off ? "off" : finite(ledger.relative) ? "ok" : "\u2013", finite(ledger.relative) ? `off by ${ledger.relative.toExponential(1)} relative` : "", off],
  ]);
  points = Array.isArray(s.losses) ? s.losses : [];
  curve();
  workers(Array.isArray(who.list) ? who.list : []);
  const wrong = Object.entries(refused).filter(([, times]) => times > 0).map(([why, times]) => `${count(times)} ${why}`).join(", ");
  lines("faults-lines", [
    ["refused", wrong || "nothing"],
    ["skipped", s.skipped_steps > 0 ? `${count(s.skipped_steps)} steps, not finite${s.failed ? ": more than half, so the training has failed" : ""}` : "no step", s.failed],
    ["checkpoint", checkpoint.path ? `${checkpoint.path}, every ${count(checkpoint.every)} steps` : "none is kept"],
    ["saved", finite(checkpoint.last_s) ? `${count(checkpoint.saved)}, the last ${seconds(checkpoint.last_s)} ago, ${bytes(checkpoint.bytes)}` : count(checkpoint.saved)],
    ["failed", checkpoint.failed > 0 ? `${count(checkpoint.failed)}, the last: ${checkpoint.last_error}` : "never", checkpoint.failed > 0],
    ["memory", `${bytes(s.memory_bytes)}, ${count(s.connections)} connections`],
  ]);
  lines("books-lines", [
    ...["computed", "applied", "held", "lost", "difference"].map((entry) => [entry, number(ledger[entry], 6), entry === "difference" && off]),
    ["model", `${count(model.tensors)} tensors, ${count(model.elements)} elements in ${count(model.parts)} shard${model.parts === 1 ? "" : "s"}`],
  ]);
}

let silent = null;  // since when the server does not answer
async function ask() {
  try {
    const answer = await fetch("status.json", {cache: "no-store", signal: AbortSignal.timeout(4000)});
    if (!answer.ok) throw new Error(answer.status);
    show(await answer.json());
    silent = null;
  } catch {
    silent ??= new Date();
    set(id("gone"), `The server does not answer since ${silent.toTimeString().slice(0, 8)}. Asking on; what is below is the last it said.`);
  }
  id("gone").hidden = silent === null;
  document.body.classList.toggle("old", silent !== null);
  setTimeout(ask, 1000);
}
ask();
