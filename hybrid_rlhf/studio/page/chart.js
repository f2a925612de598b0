// One chart: mean lines with a light band from low to high, several over each other. Read by pointer, by arrow keys,
// and as a table. It grows in place: the nodes stay, and only paths and texts that have changed are set.

import {
  allSteps, bandPath, dotsPath, extent, linePath, nearest, placeAt, stepText, stepTicks, tickText, ticks
} from "./chart_scale.js";
import {make} from "./dom.js";
import {breakable, number, unitOf} from "./format.js";
import {arrange, keyed, put, putAttribute} from "./in_place.js";

const HEIGHT = 190, TOP = 8, RIGHT = 10, BOTTOM = 22;
const MANY_DOTS = 60; // of held-out values: more are a line alone
const NUM_COLOURS = 8; // that chart.css has

// makeChart({name, meaning}) -> {node, name, update(series), end()}. series: [{key, run, label, place, isSparse, steps,
// low, high, mean}]: run: whose it is; place chooses colour and dashes; isSparse: held out, with a dot at each value.
export function makeChart({name, meaning}) {
  const chart = {name, all: [], steps: [], read: null, width: 0, unit: {factor: 1, word: ""}};
  chart.node = frame(chart, meaning);
  chart.lines = keyed(() => makeLine());
  chart.keys = keyed(() => makeKey());
  const sizes = new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (width === chart.width || !width) return;
    chart.width = width;
    draw(chart);
  });
  sizes.observe(chart.plot);
  listen(chart);
  return {node: chart.node, name, end: () => sizes.disconnect(), update: (all) => {
    chart.isFilled = true;
    chart.all = all.filter((series) => series.steps.length);
    chart.steps = allSteps(chart.all);
    draw(chart);
    if (chart.table.open) fillTable(chart);
  }};
}

function svg(tag, properties = {}, ...inside) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(properties)) node.setAttribute(key, value);
  node.append(...inside);
  return node;
}

function frame(chart, meaning) {
  chart.when = make("span.when");
  chart.legend = make("ul.legend");
  chart.reader = make("input.reader", {
    type: "range", min: "0", max: "0", value: "0", "aria-label": `Step, of ${chart.name}`});
  chart.grid = svg("g", {class: "grid"});
  chart.bands = svg("g");
  chart.curves = svg("g");
  chart.cursor = svg("path", {class: "cursor"});
  chart.plot = svg("svg", {class: "plot", role: "img", height: HEIGHT},
    chart.grid, chart.bands, chart.curves, chart.cursor);
  chart.area = make("div.plot-area", {}, chart.reader, chart.plot);
  chart.table = make("details", {}, make("summary", {}, "As a table", make("span.hidden", {}, `: ${chart.name}`)));
  chart.title = make("h3", {}, ...breakable(chart.name));
  return make("figure.chart", {"data-metric": chart.name},
    make("div.chart-head", {}, chart.title, chart.when), meaning ? make("p.meaning", {}, meaning) : null,
    chart.legend, chart.area, chart.table);
}

function listen(chart) {
  const readAt = (event) => {
    const box = chart.plot.getBoundingClientRect();
    chart.read = chart.back ? Math.round(chart.back(event.clientX - box.left)) : null;
    tellReading(chart);
  };
  chart.plot.addEventListener("pointermove", readAt);
  chart.plot.addEventListener("pointerdown", readAt);
  chart.plot.addEventListener("pointerleave", () => {
    chart.read = null;
    tellReading(chart);
  });
  chart.reader.addEventListener("input", () => {
    chart.read = chart.steps[Number(chart.reader.value)] ?? null;
    tellReading(chart);
  });
  chart.reader.addEventListener("blur", () => {
    chart.read = null;
    tellReading(chart);
  });
  chart.table.addEventListener("toggle", () => {
    if (chart.table.open) fillTable(chart);
    else chart.table.querySelector(".scroller")?.remove();
  });
}

const nameOf = ({label, isSparse}) => [label, isSparse ? "held out" : ""].filter(Boolean).join(", ");
const styleOf = (series) => `c${series.place % NUM_COLOURS}${series.isSparse ? " sparse" : ""}`;

function makeLine() {
  const band = svg("path"), line = svg("path"), dots = svg("path");
  const node = svg("g", {}, line, dots);
  return {band, node, update(series) {
    const style = styleOf(series);
    putAttribute(band, "class", `band ${style}`);
    putAttribute(line, "class", `curve ${style}`);
    putAttribute(dots, "class", `dots ${style}`);
  }, draw(series, x, y) {
    putAttribute(band, "d", bandPath(series, x, y));
    putAttribute(line, "d", linePath(series, x, y));
    putAttribute(dots, "d", series.isSparse && series.steps.length <= MANY_DOTS ? dotsPath(series, x, y) : "");
  }};
}

// A piece of the line of colour and dashes number `place`.
export function swatch(place = 0) {
  const path = svg("path", {d: "M1 5H25", class: `curve c${place % NUM_COLOURS}`});
  return svg("svg", {class: "swatch", width: 26, height: 10, "aria-hidden": "true"}, path);
}

// A line of the legend: one run, its value, and its held-out value.
function makeKey() {
  const dot = svg("path", {d: "M5 5h0"}), label = make("span.label"), line = swatch();
  const [main, heldOut] = [0, 1].map(() => ({value: make("span.value"), band: make("span.range")}));
  const round = svg("svg", {class: "swatch", width: 10, height: 10, "aria-hidden": "true"}, dot);
  const other = make("span.held-out", {}, round, make("span.quiet", {}, "held out"), heldOut.value, heldOut.band);
  const node = make("li", {}, line, label, main.value, main.band, other);
  return {node, update({all}) {
    const plain = all.find((series) => !series.isSparse), sparse = all.find((series) => series.isSparse);
    put(label, all[0].label);
    line.toggleAttribute("hidden", !all[0].label);
    putAttribute(line.firstChild, "class", `curve ${styleOf(plain ?? all[0])}`);
    other.hidden = !sparse;
    if (sparse) putAttribute(dot, "class", `dots ${styleOf(sparse)}`);
  }, tell(texts) {
    for (const [part, isSparse] of [[main, false], [heldOut, true]]) {
      const {value, band} = texts.find((each) => each.isSparse === isSparse) ?? {value: "", band: ""};
      put(part.value, value || "\u2013"); // it has none at this step
      put(part.band, band);
    }
  }};
}

// Series with those of one run together: [{run, all}].
function byRun(all) {
  const runs = [...new Set(all.map((series) => series.run))];
  return runs.map((run) => ({run, all: all.filter((series) => series.run === run)}));
}

function draw(chart) {
  const range = extent(chart.all);
  chart.range = range;
  const lines = chart.lines(chart.all, (series) => series.key), keys = chart.keys(byRun(chart.all), ({run}) => run);
  arrange(chart.bands, lines.map((line) => line.band));
  arrange(chart.curves, lines.map((line) => line.node));
  arrange(chart.legend, keys.map((key) => key.node));
  chart.shownKeys = keys;
  chart.area.hidden = range === null;
  chart.reader.max = Math.max(chart.steps.length - 1, 0);
  if (range !== null && chart.width) {
    const {x, y} = axes(chart, range);
    chart.all.forEach((series, i) => lines[i].draw(series, x, y));
  }
  putAttribute(chart.plot, "aria-label", summary(chart));
  tellReading(chart);
}

// Ticks, lines across and their texts; they are made again only where one of them changes. Returns the two scales.
function axes(chart, range) {
  chart.unit = unitOf(chart.name, range.high);
  const factor = chart.unit.factor, across = ticks(range.low / factor, range.high / factor, 5);
  const texts = across.values.map((value) => tickText(value, across.step));
  const left = 10 + 6.6 * Math.max(...texts.map((text) => text.length)), right = chart.width - RIGHT;
  const bottom = HEIGHT - BOTTOM, lowest = across.values[0] * factor, highest = across.values.at(-1) * factor;
  const span = range.last - range.first || 1;
  const isOne = range.first === range.last;
  const x = (step) => isOne ? (left + right) / 2 : left + (step - range.first) / span * (right - left);
  const y = (value) => bottom - (value - lowest) / (highest - lowest) * (bottom - TOP);
  chart.x = x;
  chart.y = y;
  chart.back = (place) => range.first + Math.min(1, Math.max(0, (place - left) / (right - left))) * span;
  const below = [...stepTicks(range.first, range.last, Math.max(4, Math.floor(chart.width / 80)))
    .filter((step) => x(range.last) - x(step) > 45), range.last];
  const drawn = JSON.stringify([chart.width, left, texts, below, range.first, range.last]);
  if (drawn === chart.drawn) return {x, y};
  chart.drawn = drawn;
  putAttribute(chart.plot, "viewBox", `0 0 ${chart.width} ${HEIGHT}`);
  chart.grid.replaceChildren(
    ...across.values.flatMap((value, i) => [svg("path", {d: `M${left} ${y(value * factor).toFixed(1)}H${right}`}),
      svg("text", {x: left - 6, y: (y(value * factor) + 4).toFixed(1), class: "end"}, texts[i])]),
    ...below.map((step) => svg("text", {x: x(step).toFixed(1), y: HEIGHT - 6,
      class: step === range.last && !isOne ? "end" : "middle"}, stepText(step))));
  return {x, y};
}

// The values at the step that is read, or the newest; the cursor stands there while it is read.
function tellReading(chart) {
  if (!chart.steps.length) {
    put(chart.when, chart.isFilled ? "no values yet" : "");
    return;
  }
  const place = chart.read === null ? chart.steps.length - 1 : nearest(chart.steps, chart.read);
  const step = chart.steps[place];
  const read = chart.all.map((series) => {
    const at = chart.read === null ? series.steps.length - 1 : placeAt(series, step);
    return at < 0 ? null : {step: series.steps[at], mean: series.mean[at], low: series.low[at], high: series.high[at]};
  });
  put(chart.when, `step ${step.toLocaleString("en")}`);
  const texts = read.map((found) => found === null ? "" : inUnit(chart, found.mean));
  const bands = read.map((found) => !found || found.low === found.high ? ""
    : `${inUnit(chart, found.low)} to ${inUnit(chart, found.high)}`);
  byRun(chart.all).forEach(({all}, i) => chart.shownKeys[i].tell(all.map((series) => {
    const place = chart.all.indexOf(series);
    return {isSparse: series.isSparse, value: texts[place], band: bands[place]};
  })));
  if (document.activeElement !== chart.reader || chart.read === null) chart.reader.value = place;
  else chart.reader.value = nearest(chart.steps, chart.read);
  const said = chart.all.map((series, i) => `${nameOf(series)} ${texts[i]}${bands[i] && `, ${bands[i]}`}`.trim());
  putAttribute(chart.reader, "aria-valuetext", `step ${step}: ${said.filter((_, i) => texts[i]).join("; ")}`);
  putAttribute(chart.cursor, "d", chart.read === null || !chart.x ? "" : cursorPath(chart, step, read));
}

function cursorPath(chart, step, read) {
  const circles = read.filter((found) => found && Number.isFinite(found.mean)).map(({step: at, mean}) =>
    `M${(chart.x(at) - 3.5).toFixed(1)} ${chart.y(mean).toFixed(1)}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0`);
  return `M${chart.x(step).toFixed(1)} ${TOP}V${HEIGHT - BOTTOM}${circles.join("")}`;
}

const inUnit = (chart, value) => {
  const text = number(Number.isFinite(value) ? value / chart.unit.factor : value);
  return chart.unit.word && Number.isFinite(value) ? `${text} ${chart.unit.word}` : text;
};

// What the picture shows, in words.
function summary(chart) {
  if (!chart.range) return `${chart.name}: no values yet`;
  const said = chart.all.map((series) => {
    const own = extent([series]), finite = series.mean.filter(Number.isFinite);
    if (!own || !finite.length) return `${nameOf(series)} not a number throughout`.trim();
    const lost = series.mean.length - finite.length;
    const [first, last, low, high] = [finite[0], finite.at(-1), own.low, own.high].map((value) => inUnit(chart, value));
    return `${nameOf(series)} from ${first} to ${last}, lowest ${low}, highest ${high}`.trimStart()
      + (lost ? `; ${lost} values are not a number` : "");
  });
  return `${chart.name}, steps ${chart.range.first} to ${chart.range.last}: ${said.join("; ")}`;
}

function fillTable(chart) {
  const hasBand = chart.all.some(({low, high}) => low.some((value, i) => value !== high[i]));
  const parts = hasBand ? ["mean", "low", "high"] : ["mean"];
  const titles = chart.all.flatMap((series) => parts.map((part) =>
    hasBand ? `${nameOf(series)} ${part}`.trim() : nameOf(series) || "value"));
  const places = chart.all.map((series) => new Map(series.steps.map((step, i) => [step, i])));
  const head = make("tr", {}, ...["step", ...titles].map((title) => make("th.number", {scope: "col"}, title)));
  const rows = chart.steps.map((step) => make("tr", {}, make("th.number", {scope: "row"}, String(step)),
    ...chart.all.flatMap((series, i) => parts.map((part) => {
      const at = places[i].get(step);
      return make("td.number", {}, at === undefined ? "" : inUnit(chart, series[part][at]));
    }))));
  const title = `${chart.name} by step`, scroller = chart.table.querySelector(".scroller");
  const filled = make("table", {}, make("caption.hidden", {}, title),
    make("thead", {}, head), make("tbody", {}, ...rows));
  if (scroller) scroller.replaceChildren(filled);
  else chart.table.append(make("div.scroller", {tabindex: "0", role: "region", "aria-label": title}, filled));
}
