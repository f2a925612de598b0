// The curves of one run, or of several over each other: which metrics are shown, and their charts. Histories are
// fetched for what is on the screen alone, and again only when news said that there is more.

import {makeChart} from "./chart.js";
import {make} from "./dom.js";
import {arrange, put} from "./in_place.js";
import {paced, seen} from "./paced.js";
import {get} from "./server.js";

const POINTS = 400; // most that one curve has
const AT_ONCE = 25; // charts that are asked for together; the studio refuses very many
const MOST_AT_FIRST = 8;
// What a reader looks for first, in this order; "*" stands for any text.
const FIRST = ["reward", "loss", "accuracy", "mean_token_accuracy", "kl", "distill/divergence", "rewards/accuracies",
  "rewards/margins", "margin", "entropy", "completions/mean_length", "rewards/*/mean", "policy/loss", "value/loss",
  "value/explained_variance", "grad_norm", "learning_rate", "time/step"];
const HELD_OUT = "eval/";

// makeCurves(runs, remember) -> {node, update(metrics), ask(), end()}. runs: [{id, label, place}]. metrics: [{name,
// meaning, group}]. remember: under which name this browser keeps the choice of curves.
export function makeCurves(runs, remember) {
  const view = {runs, remember, metrics: [], charts: new Map(), version: 0, picked: recall(remember)};
  view.summary = make("summary");
  view.groups = make("div.metric-groups");
  view.picker = make("details.picker", {}, view.summary, view.groups);
  view.grid = make("div.charts");
  view.fault = make("p.fault", {role: "status"});
  view.node = make("div", {}, view.picker, view.fault, view.grid);
  view.load = paced(() => load(view), {node: view.grid, fail: (fault) => put(view.fault, fault.message)});
  return {node: view.node, update: (metrics) => update(view, metrics), ask: () => {
    view.version += 1;
    view.load();
  }, end: () => {
    view.load.end();
    for (const chart of view.charts.values()) endChart(chart);
  }};
}

// The metrics that get a chart: a held-out one is drawn into that of its namesake, where there is one.
function charted(metrics) {
  const names = new Set(metrics.map((metric) => metric.name));
  return metrics.filter(({name}) => !(name.startsWith(HELD_OUT) && names.has(name.slice(HELD_OUT.length))));
}

function atFirst(metrics) {
  const place = ({name}) => FIRST.findIndex((pattern) => {
    const [before, after] = pattern.split("*");
    return after === undefined ? name === pattern : name.startsWith(before) && name.endsWith(after);
  });
  const known = metrics.filter((metric) => place(metric) >= 0).sort((a, b) => place(a) - place(b));
  return (known.length ? known : metrics).slice(0, MOST_AT_FIRST).map((metric) => metric.name);
}

function update(view, metrics) {
  const before = JSON.stringify(view.metrics);
  view.metrics = metrics;
  if (JSON.stringify(metrics) === before) return;
  fillPicker(view);
  arrangeCharts(view);
}

const chosen = (view) => {
  const known = charted(view.metrics), names = new Set(known.map((metric) => metric.name));
  const picked = (view.picked ?? []).filter((name) => names.has(name));
  return picked.length ? picked : atFirst(known);
};

function fillPicker(view) {
  const open = chosen(view), groups = new Map();
  for (const metric of charted(view.metrics)) {
    const name = metric.group || metric.name.split("/")[0];
    groups.set(name, [...groups.get(name) ?? [], metric]);
  }
  const onchange = (event) => pick(view, event.target);
  const choice = ({name, meaning}) => make("label", {title: meaning || null},
    make("input", {type: "checkbox", value: name, checked: open.includes(name), onchange}), ` ${name}`);
  view.groups.replaceChildren(...[...groups].map(([group, metrics]) =>
    make("fieldset", {}, make("legend", {}, group), ...metrics.map(choice))));
}

function pick(view, box) {
  const now = chosen(view);
  view.picked = box.checked ? [...now, box.value] : now.filter((name) => name !== box.value);
  keep(view.remember, view.picked);
  if (!view.picked.length) fillPicker(view); // those of the beginning come back
  arrangeCharts(view);
}

function arrangeCharts(view) {
  const names = chosen(view), metrics = new Map(view.metrics.map((metric) => [metric.name, metric]));
  for (const [name, chart] of view.charts) {
    if (names.includes(name)) continue;
    endChart(chart);
    view.charts.delete(name);
  }
  for (const name of names) if (!view.charts.has(name)) view.charts.set(name, openChart(view, metrics.get(name)));
  arrange(view.grid, names.map((name) => view.charts.get(name).chart.node));
  const all = charted(view.metrics).length;
  put(view.summary, all ? `Choose curves: ${names.length} of ${all} shown` : "No metrics yet");
}

function openChart(view, metric) {
  const opened = {chart: makeChart(metric), version: -1, isSeen: false};
  opened.endSeeing = seen(opened.chart.node, (isSeen) => {
    opened.isSeen = isSeen;
    if (isSeen && opened.version < view.version) view.load();
  });
  return opened;
}

function endChart({chart, endSeeing}) {
  endSeeing();
  chart.end();
}

async function load(view) {
  const waiting = [...view.charts.values()].filter((each) => each.isSeen && each.version < view.version);
  const due = waiting.slice(0, AT_ONCE);
  if (!due.length) return;
  const version = view.version, known = new Set(view.metrics.map((metric) => metric.name));
  const names = due.flatMap(({chart: {name}}) => [name, ...known.has(HELD_OUT + name) ? [HELD_OUT + name] : []]);
  const query = {names: names.join(","), points: POINTS};
  const found = await Promise.all(view.runs.map(({id}) => get("history", {id, ...query})));
  for (const each of due) {
    const {name} = each.chart;
    each.chart.update(view.runs.flatMap((run, i) =>
      [part(run, found[i], name, false), part(run, found[i], HELD_OUT + name, true)]).filter(Boolean));
    each.version = version;
  }
  put(view.fault, [...new Set(found.flatMap((history) => history.notes ?? []))].join("\n"));
  if (waiting.length > due.length) view.load();
}

function part(run, history, name, isHeldOut) {
  const values = history.series[name];
  if (!values?.steps.length) return null;
  // the two curves of one run differ in colour too; of several runs each has one colour
  const place = isHeldOut && !run.label ? run.place + 1 : run.place;
  const isSparse = isHeldOut || name.startsWith(HELD_OUT);
  return {...values, key: `${run.id} ${name}`, run: run.id, label: run.label, place, isSparse};
}

function recall(name) {
  try {
    const found = JSON.parse(localStorage.getItem(`curves ${name}`));
    return Array.isArray(found) ? found : null;
  } catch {
    return null; // this browser keeps nothing: the usual ones
  }
}

function keep(name, picked) {
  try {
    localStorage.setItem(`curves ${name}`, JSON.stringify(picked));
  } catch {
    // it keeps nothing; the choice holds as long as the page is open
  }
}
