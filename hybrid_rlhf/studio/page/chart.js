// One chart: mean lines with a light band from low to high, several over each other. Read by pointer, by arrow keys,
// and as a table. It grows in place: nodes stay, and only paths and texts that have changed are set.
// A series is {key, run, label, place, isSparse, steps, low, high, mean}: run, the run's id; place, its colour and
// dashes; isSparse, held out, with a dot at each value; then lists of one length, with null for what is not a number.

import {arrange, fold, keyed, make, put, putAttribute, table} from "./dom.js";
import {breakable, number, unitOf} from "./format.js";
import {titleOf} from "./metric_titles.js";

const HEIGHT = 190, TOP = 8, RIGHT = 10, BOTTOM = 22;
const MAX_DOTS = 60; // held-out values that get a dot each; more are a line alone
const NUM_COLOURS = 8; // that studio.css has

// makeChart({name, meaning}) -> {node, name, update(series), end()}.
export function makeChart({name, meaning}) {
  const chart = {name, all: [], steps: [], read: null, width: 0, unit: {factor: 1, word: ""}};
  chart.node = frame(chart, meaning);
  chart.lines = keyed(makeLine);
  chart.keys = keyed(makeKey);
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
    chart.steps = [...new Set(chart.all.flatMap((series) => series.steps))].sort((a, b) => a - b);
    draw(chart);
    if (chart.table.open) fillTable(chart);
  }};
}

export function svg(tag, properties = {}, ...inside) {
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
  [chart.grid, chart.bands, chart.curves] = [svg("g", {class: "grid"}), svg("g"), svg("g")];
  chart.cursor = svg("path", {class: "cursor"});
  chart.plot = svg("svg", {class: "plot", role: "img", height: HEIGHT},
    chart.grid, chart.bands, chart.curves, chart.cursor);
  chart.area = make("div.plot-area", {}, chart.reader, chart.plot);
  const title = titleOf(chart.name);
  chart.table = fold("As a table");
  chart.table.firstChild.append(make("span.hidden", {}, `: ${chart.name}`));
  return make("figure.chart", {"data-metric": chart.name},
    make("div.chart-head", {}, make("h3", {}, ...breakable(title)), chart.when),
    title === chart.name ? null : make("code.name-of", {}, ...breakable(chart.name)),
    meaning ? make("p.meaning", {}, meaning) : null, chart.legend, chart.area, chart.table);
}

function listen(chart) {
  const {plot, reader} = chart;
  const read = (step) => {
    chart.read = step;
    showReading(chart);
  };
  const readAt = ({clientX}) =>
    read(chart.stepAt ? Math.round(chart.stepAt(clientX - plot.getBoundingClientRect().left)) : null);
  plot.addEventListener("pointermove", readAt);
  plot.addEventListener("pointerdown", readAt);
  plot.addEventListener("pointerleave", () => read(null));
  reader.addEventListener("input", () => read(chart.steps[Number(reader.value)] ?? null));
  reader.addEventListener("blur", () => read(null));
  chart.table.addEventListener("toggle", () => {
    if (chart.table.open) fillTable(chart);
    else chart.table.querySelector(".scroller")?.remove();
  });
}

const nameOf = ({label, isSparse}) => [label, isSparse ? "held out" : ""].filter(Boolean).join(", ");
const styleOf = (series) => `c${series.place % NUM_COLOURS}${series.isSparse ? " sparse" : ""}`;

function makeLine() {
  const band = svg("path"), line = svg("path"), smooth = svg("path"), dots = svg("path");
  return {band, node: svg("g", {}, line, smooth, dots), update(series) {
    const style = styleOf(series);
    putAttribute(band, "class", `band ${style}`);
    putAttribute(line, "class", `curve ${style}`);
    putAttribute(smooth, "class", `curve smoothed ${style}`);
    putAttribute(dots, "class", `dots ${style}`);
  }, draw(series, x, y) {
    putAttribute(band, "d", bandPath(series, x, y));
    putAttribute(line, "d", linePath(series, x, y));
    putAttribute(smooth, "d", linePath({...series, mean: smoothed(series.mean)}, x, y));
    putAttribute(dots, "d", series.isSparse && series.steps.length <= MAX_DOTS ? dotsPath(series, x, y) : "");
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
  return {node: make("li", {}, line, label, main.value, main.band, other), update({all}) {
    const plain = all.find((series) => !series.isSparse), sparse = all.find((series) => series.isSparse);
    put(label, all[0].label);
    line.toggleAttribute("hidden", !all[0].label);
    putAttribute(line.firstChild, "class", `curve ${styleOf(plain ?? all[0])}`);
    other.hidden = !sparse;
    if (sparse) putAttribute(dot, "class", `dots ${styleOf(sparse)}`);
  }, show({all}, readings) {
    for (const [texts, isSparse] of [[main, false], [heldOut, true]]) {
      const reading = readings.get(all.find((series) => series.isSparse === isSparse));
      put(texts.value, reading?.value || "\u2013"); // no value at this step
      put(texts.band, reading?.band ?? "");
    }
  }};
}

// The series of each run: [{run, all}].
function byRun(all) {
  const runs = [...new Set(all.map((series) => series.run))];
  return runs.map((run) => ({run, all: all.filter((series) => series.run === run)}));
}

function draw(chart) {
  chart.range = extent(chart.all);
  chart.runs = byRun(chart.all);
  const lines = chart.lines(chart.all, (series) => series.key);
  chart.shownKeys = chart.keys(chart.runs, ({run}) => run);
  arrange(chart.bands, lines.map((line) => line.band));
  arrange(chart.curves, lines.map((line) => line.node));
  arrange(chart.legend, chart.shownKeys.map((key) => key.node));
  chart.area.hidden = chart.range === null;
  chart.reader.max = Math.max(chart.steps.length - 1, 0);
  if (chart.range !== null && chart.width) {
    drawAxes(chart);
    chart.all.forEach((series, i) => lines[i].draw(series, chart.x, chart.y));
  }
  putAttribute(chart.plot, "aria-label", summary(chart));
  showReading(chart);
}

// Set the scales chart.x, chart.y and back, chart.stepAt, and draw ticks and their texts.
function drawAxes(chart) {
  const {range: {first, last, low, high}, width} = chart;
  chart.unit = unitOf(chart.name, high);
  const {factor} = chart.unit, across = ticks(low / factor, high / factor, 5);
  const texts = across.values.map((value) => tickText(value, across.step));
  const left = 10 + 6.6 * Math.max(...texts.map((text) => text.length)), right = width - RIGHT;
  const bottom = HEIGHT - BOTTOM, lowest = across.values[0] * factor, highest = across.values.at(-1) * factor;
  const span = last - first || 1, isOne = first === last;
  const x = chart.x = (step) => isOne ? (left + right) / 2 : left + (step - first) / span * (right - left);
  const y = chart.y = (value) => bottom - (value - lowest) / (highest - lowest) * (bottom - TOP);
  chart.stepAt = (place) => first + Math.min(1, Math.max(0, (place - left) / (right - left))) * span;
  const below = [...stepTicks(first, last, Math.max(4, Math.floor(width / 80)))
    .filter((step) => x(last) - x(step) > 45), last];
  putAttribute(chart.plot, "viewBox", `0 0 ${width} ${HEIGHT}`);
  chart.grid.replaceChildren(
    ...across.values.flatMap((value, i) => [svg("path", {d: `M${left} ${y(value * factor).toFixed(1)}H${right}`}),
      svg("text", {x: left - 6, y: (y(value * factor) + 4).toFixed(1), class: "end"}, texts[i])]),
    ...below.map((step) => svg("text", {x: x(step).toFixed(1), y: HEIGHT - 6,
      class: step === last && !isOne ? "end" : "middle"}, stepText(step))));
}

// Show the values at the step that is read, or the newest; the cursor stands at a step that is read.
function showReading(chart) {
  const {steps, read} = chart;
  if (!steps.length) return put(chart.when, chart.isFilled ? "no values yet" : "");
  const place = read === null ? steps.length - 1 : nearest(steps, read), step = steps[place];
  const readings = new Map(chart.all.map((series) =>
    [series, readingOf(chart, series, read === null ? series.steps.length - 1 : placeAt(series, step))]));
  put(chart.when, `step ${step.toLocaleString("en")}`);
  chart.runs.forEach((run, i) => chart.shownKeys[i].show(run, readings));
  chart.reader.value = place;
  const spoken = [...readings].filter(([, reading]) => reading).map(([series, {value, band}]) =>
    `${nameOf(series)} ${value}${band && `, ${band}`}`.trim());
  putAttribute(chart.reader, "aria-valuetext", `step ${step}: ${spoken.join("; ")}`);
  putAttribute(chart.cursor, "d", read === null || !chart.x ? "" : cursorPath(chart, step, [...readings.values()]));
}

function cursorPath({x, y}, step, readings) {
  const circles = readings.filter((reading) => Number.isFinite(reading?.mean)).map((reading) =>
    `M${(x(reading.step) - 3.5).toFixed(1)} ${y(reading.mean).toFixed(1)}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0`);
  return `M${x(step).toFixed(1)} ${TOP}V${HEIGHT - BOTTOM}${circles.join("")}`;
}

// What a series has at one place, as texts too; null where that is nowhere.
function readingOf(chart, {steps, mean, low, high}, i) {
  if (i < 0) return null;
  const band = low[i] === high[i] ? "" : `${inUnit(chart, low[i])} to ${inUnit(chart, high[i])}`;
  return {step: steps[i], mean: mean[i], value: inUnit(chart, mean[i]), band};
}

function inUnit({unit}, value) {
  if (!Number.isFinite(value)) return number(value);
  return unit.word ? `${number(value / unit.factor)} ${unit.word}` : number(value);
}

// The picture in words.
function summary(chart) {
  if (!chart.range) return `${chart.name}: no values yet`;
  const lines = chart.all.map((series) => {
    const range = extent([series]), finite = series.mean.filter(Number.isFinite);
    if (!range || !finite.length) return `${nameOf(series)} not a number throughout`.trim();
    const lost = series.mean.length - finite.length;
    const [first, last, low, high] =
      [finite[0], finite.at(-1), range.low, range.high].map((value) => inUnit(chart, value));
    return `${nameOf(series)} from ${first} to ${last}, lowest ${low}, highest ${high}`.trimStart()
      + (lost ? `; ${lost} values are not a number` : "");
  });
  return `${chart.name}, steps ${chart.range.first} to ${chart.range.last}: ${lines.join("; ")}`;
}

function fillTable(chart) {
  const hasBand = chart.all.some(({low, high}) => low.some((value, i) => value !== high[i]));
  const columns = chart.all.flatMap((series) => {
    const places = new Map(series.steps.map((step, i) => [step, i]));
    return (hasBand ? ["mean", "low", "high"] : ["mean"]).map((part) => ({
      title: hasBand ? `${nameOf(series)} ${part}`.trim() : nameOf(series) || "value", isNumber: true,
      cell: (step) => places.has(step) ? inUnit(chart, series[part][places.get(step)]) : ""}));
  });
  const steps = {title: "step", isNumber: true, isHead: true, cell: String};
  const filled = table([steps, ...columns], chart.steps, `${chart.name} by step`);
  const before = chart.table.querySelector(".scroller"); // stays, and where it is scrolled to
  if (before) before.replaceChildren(...filled.childNodes);
  else chart.table.append(filled);
}

// ---- arithmetic: ranges, ticks, and values as the text of SVG paths

// Lowest and highest step and value of several series; null where there is not a single value.
function extent(all) {
  let first = Infinity, last = -Infinity, low = Infinity, high = -Infinity;
  for (const series of all) {
    for (let i = 0; i < series.steps.length; i++) {
      first = Math.min(first, series.steps[i]);
      last = Math.max(last, series.steps[i]);
      for (const value of [series.low[i], series.high[i], series.mean[i]]) {
        if (!Number.isFinite(value)) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
  }
  return low > high ? null : {first, last, low, high};
}

// Round values that cover low to high: at most about `most`, at distances of 1, 2 or 5 times a power of ten.
function ticks(low, high, most) {
  if (low === high) {
    const room = Math.abs(low) * 0.1 || 1;
    return ticks(low - room, high + room, most);
  }
  const rough = (high - low) / Math.max(most - 1, 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((times) => power * times >= rough * 0.999999);
  const begin = Math.floor(low / step + 1e-9), end = Math.ceil(high / step - 1e-9);
  return {step, values: Array.from({length: end - begin + 1}, (_, i) => (begin + i) * step)};
}

// Round steps within first to last, whole numbers.
function stepTicks(first, last, most) {
  if (first === last) return [first];
  const {step} = ticks(first, last, most), distance = Math.max(1, Math.round(step));
  const begin = Math.ceil(first / distance);
  return Array.from({length: Math.floor(last / distance) - begin + 1}, (_, i) => (begin + i) * distance);
}

// A tick's value with as many decimals as its distance to the next one needs.
function tickText(value, step) {
  const size = Math.max(Math.abs(value), step);
  if (value === 0) return "0";
  if (size >= 1e6 || step < 1e-4) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
}

const stepText = (step) => step >= 10000 && step % 100 === 0 ? `${step / 1000}k` : String(step);

const pointOf = (steps, values, x, y) => (i) => `${x(steps[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`;

// Lists of neighbouring places whose values are numbers.
function pieces(values) {
  const all = [[]];
  values.forEach((value, i) => Number.isFinite(value) ? all.at(-1).push(i) : all.push([]));
  return all.filter((piece) => piece.length);
}

// The mean as a line; it breaks at values that are not numbers, and a value between two breaks is a dot.
function linePath({steps, mean}, x, y) {
  return pieces(mean).map((piece) => `M${piece.map(pointOf(steps, mean, x, y)).join("L")}h0`).join("");
}

// Means over a twentieth of the values to both sides; what is not a number stays so.
function smoothed(values) {
  const reach = Math.ceil(values.length / 20);
  return values.map((value, i) => {
    const near = values.slice(Math.max(0, i - reach), i + reach + 1).filter(Number.isFinite);
    return Number.isFinite(value) ? near.reduce((sum, each) => sum + each, 0) / near.length : value;
  });
}

// A dot at every value.
function dotsPath({steps, mean}, x, y) {
  return pieces(mean).flat().map(pointOf(steps, mean, x, y)).map((point) => `M${point}h0`).join("");
}

// The area from low to high; empty where the two are equal throughout.
function bandPath({steps, low, high}, x, y) {
  if (low.every((value, i) => value === high[i])) return "";
  const outlines = pieces(low).filter((piece) => piece.length > 1).map((piece) =>
    [...piece.map(pointOf(steps, high, x, y)), ...piece.toReversed().map(pointOf(steps, low, x, y))]);
  return outlines.map((points) => `M${points.join("L")}Z`).join("");
}

// The place of the step nearest to `step`.
const nearest = (steps, step) =>
  steps.reduce((best, value, i) => Math.abs(value - step) < Math.abs(steps[best] - step) ? i : best, 0);

// Where the series has a value for `step`: at most as far away as its own steps lie apart there; -1 for nowhere.
function placeAt({steps}, step) {
  const place = nearest(steps, step);
  const here = steps[place], before = steps[place - 1] ?? here, after = steps[place + 1] ?? here;
  return Math.abs(here - step) <= Math.max(1, here - before, after - here) ? place : -1;
}
