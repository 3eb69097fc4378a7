// SPDX-License-Identifier: Apache-2.0
// Draws what charts.js describes, listens to the choices, to a change between light and dark and to printing, and
// starts the page. A figure keeps its parts (finding, picture, numbers) while it is drawn anew, so that what was
// unfolded stays unfolded.

const drawn = new Map();  // id of a figure -> its parts

function draw(id, description) {
  const figure = byId(id);
  let parts = drawn.get(id);
  if (!parts || parts.figure !== figure) {
    const finding = el("p", {class: "finding", "aria-live": id === "figure-time" ? "polite" : undefined});
    const legend = el("ul", {class: "parts"});
    const box = el("div", {class: "canvas"});
    const details = el("details", {}, el("summary", {}, "Numbers"));
    figure.replaceChildren(finding, legend, box, details);
    parts = {figure, finding, legend, box, details, chart: null};
    drawn.set(id, parts);
    details.open = !hasCharts;
  }
  if (parts.chart) parts.chart.destroy();
  parts.chart = null;
  parts.box.replaceChildren();
  while (parts.details.children.length > 1) parts.details.lastChild.remove();
  parts.box.hidden = !hasCharts || description === null || !description.config;
  parts.details.hidden = description === null;
  parts.legend.replaceChildren();
  if (description === null) {
    parts.finding.textContent = "Nothing of what is chosen above has been recorded.";
    return;
  }
  parts.finding.textContent = description.finding;
  parts.details.append(description.numbers);
  if (!hasCharts || !description.config) return;
  for (const [name, colour] of description.parts ?? []) {
    const swatch = el("i");
    swatch.style.background = colour;
    parts.legend.append(el("li", {}, swatch, name));
  }
  parts.legend.hidden = !description.parts;
  if (description.height) parts.box.style.height = `${description.height}px`;
  const canvas = el("canvas", {role: "img", "aria-label": description.label}, description.label);
  parts.box.append(canvas);
  parts.chart = new Chart(canvas, description.config);
}

function drawAll() {
  for (const [id, parts] of drawn) {
    if (document.contains(parts.figure)) continue;
    if (parts.chart) parts.chart.destroy();
    drawn.delete(id);
  }
  draw("figure-epochs", epochsChart());
  draw("figure-bytes", bytesChart());
  draw("figure-time", timeChart());
  draw("figure-split", splitChart());
  draw("figure-bits", bitsChart());
  draw("figure-layers", layersChart());
  for (const series of visible())
    if (byId(`figure-levels-${series.index}`)) draw(`figure-levels-${series.index}`, levelsChart(series));
}

// Choices -------------------------------------------------------------------------------------------------------------

function addChoice(fieldset, type, name, value, checked, label, change) {
  const input = el("input", {type, name, value});
  input.checked = checked;
  input.addEventListener("change", () => change(input.checked));
  fieldset.append(el("label", {}, input, ...label));
}

function writeChoices() {
  for (const id of ["group", "link", "legend"]) byId(id).replaceChildren(byId(id).querySelector("legend"));
  byId("group").hidden = data.groups.length < 2;
  data.groups.forEach(
      (each, i) =>
          addChoice(byId("group"), "radio", "group", i, i === shown.group, [`${each.task}, ${each.model}`], () => {
            shown.group = i;
            showAll();
            byId("group").querySelector("input:checked").focus();
          }));
  data.links.forEach(
      (link, i) => addChoice(byId("link"), "radio", "link", i, i === shown.link, [linkText(link)], () => {
        shown.link = i;
        writeHighlights();
        draw("figure-time", timeChart());
      }));
  for (const series of inGroup())
    addChoice(
        byId("legend"), "checkbox", "series", series.index, !shown.hidden.has(series.index), named(series),
        (checked) => {
          shown.hidden[checked ? "delete" : "add"](series.index);
          writeLearned();
          drawAll();
        });
}

function showAll() {
  const {metric} = group();
  for (const place of document.querySelectorAll(".metric")) place.textContent = `Test ${metric}`;
  writeChoices();
  writeHighlights();
  writeHeadline();
  writeProjection();
  writeLearned();
  writeSettings();
  drawAll();
}

function setPrinting(on) {
  printing = on;
  document.documentElement.classList.toggle("printing", on);
  showAll();
}

if (hasCharts) Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
byId("no-charts").hidden = hasCharts;
writeSummary();
showAll();
dark.addEventListener("change", showAll);
addEventListener("beforeprint", () => setPrinting(true));
addEventListener("afterprint", () => setPrinting(false));
