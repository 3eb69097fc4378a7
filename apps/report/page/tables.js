// SPDX-License-Identifier: Apache-2.0
// Everything in the page that is text: the summary, the highlights, the tables, what was learned and how it was run.

// A table with a caption, heads with a scope and a box to scroll in. Columns: {name, note, text}; a row's first cell is
// its head. The box can be scrolled by keyboard and says what it is. Where columns lie beyond its edge, a line above it
// says so and its edge is shaded.
const beyond = new ResizeObserver((entries) => entries.forEach(({target}) => showEdge(target)));
function showEdge(box) {
  const hidden = box.scrollWidth - box.clientWidth;
  box.parentNode.classList.toggle("wide", hidden > 1);
  box.classList.toggle("more", hidden - box.scrollLeft > 1);
}

function table(caption, columns, rows) {
  const head = el("tr");
  for (const {name, note, text} of columns)
    head.append(el("th", {scope: "col", class: text ? "text" : undefined}, name, note ? el("small", {}, note) : null));
  const body = el("tbody");
  for (const cells of rows) {
    const row = el("tr");
    cells.forEach((cell, i) => {
      const parts = Array.isArray(cell) ? cell : [cell];
      row.append(
          i === 0 ? el("th", {scope: "row"}, ...parts) :
                    el("td", {class: columns[i].text ? "text" : undefined}, ...parts));
    });
    body.append(row);
  }
  const box =
      el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption},
         el("table", {}, el("caption", {}, el("span", {}, caption)), el("thead", {}, head), body));
  box.addEventListener("scroll", () => showEdge(box));
  beyond.observe(box);
  return el("div", {class: "table"}, el("p", {class: "hint", "aria-hidden": "true"}, "more columns: scroll sideways \u2192"), box);
}

// A spec, which may be broken after a colon or a comma and nowhere else.
const spec = (text) => el(
    "span", {class: "code"},
    ...(text.match(/[^:,]+[:,]*|[:,]+/g) ?? []).flatMap((part, i) => (i ? [el("wbr"), part] : [part])));

const named = (series) =>
    [keyOf(series), spec(series.label),
     series.partial ? el("span", {class: "badge"}, "unfinished") : null];

// Summary and highlights ----------------------------------------------------------------------------------------------

const valuesOf =
    (setting) => [...new Set(data.series.map((series) => series.settings[setting]).filter((value) => value !== ""))];

function writeSummary() {
  const tasks = data.groups.map((each) => `${each.task}, ${each.model}`);
  const codecs = new Set(data.series.map((series) => series.codec)).size;
  const title = `${plural(codecs, "codec")} on ${listed(tasks)}`;
  byId("title").textContent = title;
  document.title = `${title} \u2013 gradwire`;
  const seeds = new Set(data.runs.map((run) => run.seed)).size;
  const open = data.runs.filter((run) => !run.finished).length;
  const epochs = valuesOf("epochs");
  const parts = [
    `${plural(data.runs.length, "run")} with ${plural(seeds, "seed")}${
        open ? `, ${open === data.runs.length ? "none" : data.runs.length - open} of them finished` : ""}`,
    `${listed(valuesOf("workers"))} worker${valuesOf("workers").join() === "1" ? "" : "s"}`,
    `collective ${listed(valuesOf("collective"))}`,
    epochs.length ? `${listed(epochs)} epoch${epochs.join() === "1" ? "" : "s"}` : "",
    `${listed(valuesOf("parameters").map(count))} parameters`,
  ].filter(Boolean);
  byId("summary").textContent =
      `${parts.join("; ")}. Trained on ${listed(valuesOf("device"))} (${listed(valuesOf("machine"))}).`;
  byId("made").textContent = `${madeText()} Page written by gradwire.`;
}

// What made the runs, when and where.
const madeBy = (of) => [...new Set(data.runs.map((run) => (run.made ? of(run.made) : "")).filter(Boolean))];
const madeVersions = () => madeBy(({version, commit}) => version + (commit ? ` (commit ${commit})` : ""));
function madeDates() {
  const dates = madeBy(({date}) => date).sort();
  const [first, last] = [dates[0], dates[dates.length - 1]];
  const shown = (date) => date.replace("T", " ").replace("Z", " UTC");
  return dates.length < 2 ? dates.map(shown) : [`${shown(first)} to ${shown(last)}`];
}
function madeText() {
  if (!madeVersions().length) return "The records do not say which version of gradwire made the runs.";
  const older = data.runs.filter((run) => !run.made).length;
  return `Runs made by gradwire ${listed(madeVersions())} on ${listed(madeBy(({host}) => host)) || "an unnamed host"}, ${
      madeDates().join("")}${older ? ` (${older} of ${data.runs.length} records do not say)` : ""}.`;
}

const isLevel = (series) => series.difference !== null && known(series.difference.mean) &&
    (isPercent(series.metric) ? series.difference.mean >= -0.005 :
                                series.final.mean <= 1.01 * data.series[series.reference].final.mean);
const finishOn = (series, link) =>
    (series.curve.length ? series.curve[series.curve.length - 1].seconds[link] : undefined);
const reachOn = (series, link) => (series.target === null ? undefined : series.curve[series.target].seconds[link]);

function writeHighlights() {
  const tiles = [];
  const add = (term, figure, series, words) => tiles.push(
      el("div", {}, el("dt", {}, term), el("dd", {class: "figure"}, figure),
         el("dd", {}, series ? el("span", {class: "code"}, series.label) : "", words)));
  const {metric} = group();
  const finished = inGroup().filter((series) => !series.partial && known(series.final.mean));
  const fp32 = finished.find((series) => series.reference === series.index);
  if (fp32)
    add(`fp32, test ${metric}`, spreadText(fp32.final, metric), null,
        `mean of ${plural(fp32.final.count, "seed")}${
            fp32.final.count > 1 ? " \u00b1 sample standard deviation" : ""}`);
  const level = finished.filter(isLevel).sort((a, b) => a.bits - b.bits)[0];
  if (level)
    add(`Fewest bits within ${closeTo(metric)} of fp32`, ratioText(32 / level.bits) + " fewer", level,
        `: ${bitsText(level.bits)} bits per element, ${signedText(level.difference.mean, metric)}${
            isPercent(metric) ? " points" : ""}`);
  const own = fp32 && reachOn(fp32, shown.link);
  const fastest = own &&
      finished.filter((series) => reachOn(series, shown.link) !== undefined)
          .sort((a, b) => reachOn(a, shown.link) - reachOn(b, shown.link))[0];
  if (fastest)
    add(`Soonest within ${closeTo(metric)} at ${linkText(data.links[shown.link])}, projected`,
        fastest === fp32 ? "fp32 itself" : `${three(own / reachOn(fastest, shown.link))}\u00d7 sooner`, fastest,
        `: ${secondsText(reachOn(fastest, shown.link))}${fastest === fp32 ? "" : `, fp32 ${secondsText(own)}`}`);
  if (!fp32 && finished.length) {
    const best = finished.reduce((a, b) => (better(metric, b.final.mean, a.final.mean) ? b : a));
    add(`Best test ${metric}`, spreadText(best.final, metric), best, "");
  }
  byId("highlights").replaceChildren(...tiles);
}

function writeHeadline() {
  const {metric} = group();
  const varied = data.varied.filter((name) => name !== "collective");
  const mixed = data.varied.includes("metric");
  const columns = [
    {name: "Codec"}, ...varied.map((name) => ({name: name[0].toUpperCase() + name.slice(1), text: true})),
    {name: mixed ? "Test result" : `Test ${metric}`, note: "mean \u00b1 std. dev."},
    {name: "From fp32", note: isPercent(metric) && !mixed ? "points, paired" : "paired"},
    {name: "Bits", note: "per element"}, {name: "Ratio", note: "fp32 / sent"}, {name: "Sent", note: "per worker"},
    {name: "Pays below", note: "Gb/s, fp32 / 16 bits"},
    {name: "Collective", text: true}, {name: "Skipped", note: "steps"}, {name: "Time", note: "wall clock"},
    {name: "Seeds", note: "finished"}
  ];
  const rows = data.series.map((series) => {
    const any = series.final.count > 0;
    const difference = series.difference;
    const open = series.runs - series.counted;
    return [
      named(series), ...varied.map((name) => series.settings[name] || NONE), spreadText(series.final, series.metric),
      series.reference === series.index ? "reference" :
          difference === null           ? NONE :
                                          signedText(difference.mean, series.metric) +
              (difference.count > 1 ?
                   ` \u00b1 ${(unit(series.metric) * difference.deviation).toFixed(digits(series.metric))}` :
                   ""),
      any ? bitsText(series.bits) : NONE, any ? ratioText(series.ratio) : NONE, any ? bytesText(series.bytes) : NONE,
      any ? series.pays.map(paysText).join(" / ") : NONE, series.collective,
      any ? (Number.isInteger(series.skipped) ? count(series.skipped) : series.skipped.toFixed(1)) : NONE,
      any ? secondsText(series.wall) : NONE,
      series.partial ? `0 of ${series.runs}` :
          open ? `${series.counted} of ${series.runs}` :
                 String(series.counted)
    ];
  });
  byId("headline").replaceChildren(table("Every codec at the end of its training, means over seeds", columns, rows));
  const notes = [
    "\u00b1 is the sample standard deviation over seeds.",
    "Ratio is the number of bytes that fp32 would send in as many steps divided by the bytes sent, everything counted.",
    "Pays below is the speed of a link below which the bytes saved are worth the codec\u2019s own time, against fp32 and against a 16-bit cast that takes no time. Nothing overlaps in this figure; with overlap a codec pays on faster links too."
  ];
  if (data.series.some((series) => series.difference))
    notes.push("Differences from fp32 are taken seed by seed, then averaged.");
  const foreign = data.series.filter(
      (series) => series.reference !== null && series.reference !== series.index &&
          Object.keys(series.settings)
              .some(
                  (name) => !["codec", "collective"].includes(name) && series.settings[name] !== "" &&
                      series.settings[name] !== data.series[series.reference].settings[name]));
  if (foreign.length)
    notes.push(`These were run with other settings than their fp32 reference: ${listed(foreign.map((series) => series.label))}.`);
  if (data.runs.some((run) => !run.finished))
    notes.push(
        "Unfinished runs are left out of means where a finished one exists; a codec marked unfinished shows how far it got.");
  byId("headline-note").textContent = notes.join(" ");
  const lone = data.series.filter((series) => series.counted < 2);
  byId("one-seed").hidden = !lone.length;
  byId("one-seed").textContent =
      `${lone.length === data.series.length ? "One seed" : `One seed only of ${listed(lone.map((series) => series.label))}`}: ` +
      "there is no spread, so a small difference may be noise. Repeat the comparison with --seeds 3 or more before you decide.";
}

function writeProjection() {
  const {metric} = group();
  const reference = inGroup().find((series) => series.reference !== null);
  const columns = [{name: "Codec"}];
  for (const link of data.links) columns.push({name: linkText(link), note: "to finish"});
  if (reference)
    for (const link of data.links) columns.push({name: linkText(link), note: "to reach target"});
  const list = inGroup();
  const fastest = (of, link) =>
      Math.min(...list.filter((series) => !series.partial).map((series) => of(series, link)).filter(known));
  const cell = (series, of, link) => {
    const seconds = of(series, link);
    if (!known(seconds)) return of === reachOn ? "not reached" : NONE;
    const text = secondsText(seconds);
    if (series.partial) return `${text} so far`;
    return [text === secondsText(fastest(of, link)) ? el("strong", {}, text) : text];
  };
  const rows = list.map(
      (series) =>
          [named(series), ...data.links.map((_, link) => cell(series, finishOn, link)),
           ...(reference ? data.links.map((_, link) => cell(series, reachOn, link)) : [])]);
  byId("projection")
      .replaceChildren(table("Projected training time by link; the shortest of each column is bold", columns, rows));
  let note = "There is no finished fp32 run to set a target by.";
  if (reference) {
    const base = data.series[reference.reference].final.mean;
    const target = isPercent(metric) ? base - 0.005 : base * 1.01;
    note = `Target: fp32\u2019s final test ${metric} ${isPercent(metric) ? "minus 0.5 points" : "plus 1 %"}, ${
        valueText(target, metric)}, reached at the first evaluation whose mean is there.`;
  }
  byId("projection-note").textContent = note;
  byId("compute-note").textContent = [...computeNotes(list), ...wallNotes(list)].join(" ");
}

// Compute is one number for all codecs: the model computes the same with each of them.
function computeNotes(list) {
  const kinds = new Map(list.filter((series) => series.compute.runs).map((series) => [
    JSON.stringify(series.compute), series
  ]));
  return [...kinds.values()].map((series) => {
    const {median, least, most, runs} = series.compute;
    const of = kinds.size > 1 ? ` (${series.label})` : "";
    return runs > 1 ?
        `Compute${of} is ${secondsText(median)} a step, the median of all ${runs} runs, which took ${secondsText(least)} to ${
            secondsText(most)}: the codec does not change it, the noise of the machine does.` :
        `Compute${of} is ${secondsText(median)} a step, as measured in one run.`;
  });
}

// A projection that is shorter than what the clock on the wall said needs a word.
function wallNotes(list) {
  const last = data.links.length - 1;
  const sooner = list.filter((series) => !series.partial && finishOn(series, last) < series.wall);
  if (!sooner.length) return [];
  const one = sooner.reduce((a, b) => (a.wall / finishOn(a, last) > b.wall / finishOn(b, last) ? a : b));
  return [`A projection may be shorter than the wall-clock time in the first table (${one.label}: ${
      secondsText(finishOn(one, last))} at ${linkText(data.links[last])}, ${
      secondsText(one.wall)} by the clock): there the workers shared the cores of one machine and waited for each ` +
      "other; here each worker has a processor of its own."];
}

// What was learned ----------------------------------------------------------------------------------------------------

const tensorsText = (names) =>
    (names.length > 1 ? `${names[0]} and ${names.length - 1} more` : names[0] || "no tensors");

function learnedList(tables) {
  return el(
      "ul", {class: "learned"},
      ...tables.map(
          (each) =>
              el("li", {}, `Step ${count(each.step)}, ${each.direction}, ${tensorsText(each.tensors)}: `,
                 each.lines.join("; ") || "nothing")));
}

function writeLearned() {
  const parts = [];
  for (const series of visible().filter((each) => each.tables.length)) {
    const last = Math.max(...series.tables.map((each) => each.step));
    parts.push(
        el("h3", {}, ...named(series),
           series.counted > 1 ? el("small", {class: "note"}, ` seed ${series.tables_seed}`) : null));
    if (series.tables.some((each) => each.levels)) parts.push(el("figure", {id: `figure-levels-${series.index}`}));
    parts.push(learnedList(series.tables.filter((each) => each.step === last)));
    const earlier = series.tables.filter((each) => each.step !== last);
    if (earlier.length)
      parts.push(el("details", {}, el("summary", {}, `Earlier steps (${earlier.length})`), learnedList(earlier)));
  }
  if (!parts.length) parts.push(el("p", {class: "note"}, "None of the codecs shown fits anything to the gradients."));
  byId("tables").replaceChildren(...parts);
}

// How it was run ------------------------------------------------------------------------------------------------------

function writeSettings() {
  const same = el("dl");
  for (const [name, value] of Object.entries(data.series[0].settings)) {
    if (name === "codec" || data.varied.includes(name) || valuesOf(name).length === 0) continue;
    same.append(
        el("div", {}, el("dt", {}, name), el("dd", {}, /^\d{5,}$/.test(value) ? count(value) : valuesOf(name)[0])));
  }
  for (const [name, values] of
           [["gradwire", madeVersions()], ["run on", madeDates()], ["host", madeBy(({host}) => host)]])
    same.append(el("div", {}, el("dt", {}, name), el("dd", {}, listed(values) || "not recorded")));
  const columns =
      [{name: "Codec"}, {name: "Spec in full", text: true}, ...data.varied.map((name) => ({name, text: true}))];
  const rows = data.series.map(
      (series) =>
          [named(series), spec(series.settings.codec),
           ...data.varied.map((name) => series.settings[name] || NONE)]);
  const which = ["task", "model"].filter((name) => data.varied.includes(name));
  const runs = data.runs.map((run) => {
    const series = data.series[run.series];
    const {peak, gradients, residuals, messages} = run.memory;
    return [
      named({...series, partial: false}), ...which.map((name) => series.settings[name]), run.seed,
      run.epochs ? valueText(run.value, series.metric) : NONE,
      run.finished ? "finished" :
                     el("span", {class: "badge"}, run.epochs ? `stopped after epoch ${run.epochs}` : "no epoch yet"),
      secondsText(run.wall), count(run.skipped), bytesText(peak), bytesText(gradients), bytesText(residuals),
      bytesText(messages), el("span", {class: "code"}, run.weights)
    ];
  });
  const commands = [...new Set(data.runs.map((run) => run.command).filter(Boolean))];
  const parts = [
    el("h3", {}, data.varied.length ? "The same in all runs" : "Settings"), same, el("h3", {}, "Codecs"),
    table("Codecs in full, and settings that are not the same in all runs", columns, rows), el("h3", {}, "Runs"),
    table(
        "Every run: how it ended, its memory and the hash of its final weights",
        [
          {name: "Codec"}, ...which.map((name) => ({name, text: true})), {name: "Seed"}, {name: "Final value"},
          {name: "State", text: true}, {name: "Time"}, {name: "Skipped"}, {name: "Memory", note: "peak"},
          {name: "Gradients"}, {name: "Residuals"}, {name: "Messages"}, {name: "Weights", text: true}
        ],
        runs)
  ];
  if (commands.length) {
    parts.push(el("h3", {}, commands.length > 1 ? "Commands to repeat it" : "Command to repeat it"));
    parts.push(el("p", {class: "note"}, "It writes to another folder: in the first one every run is finished and none is repeated."));
    for (const command of commands)
      parts.push(el("pre", {tabindex: "0", role: "region", "aria-label": "Command"}, command));
  }
  byId("how").replaceChildren(...parts);
}
