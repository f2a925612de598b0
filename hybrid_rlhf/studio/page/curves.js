// The curves of one run, or of several over each other: which metrics are shown, and their charts. Histories are
// fetched only for charts on the screen, and again only after news of more steps.

import {makeChart} from "./chart.js";
import {all, arrange, make, onChange, put} from "./dom.js";
import {isNarrow} from "./format.js";
import {titleOf} from "./metric_titles.js";
import {get, paced, watchSeen} from "./server.js";

const MAX_POINTS = 400; // of one curve
const MAX_AT_FIRST = 8;
// The metrics that are shown at first, in this order; "*" stands for any text.
const FIRST = ["reward", "loss", "accuracy", "mean_token_accuracy", "kl", "distill/divergence", "rewards/accuracies",
  "rewards/margins", "margin", "mark/after", "mark/kl", "entropy", "completions/mean_length", "rewards/*/mean",
  "policy/loss", "value/loss", "value/explained_variance", "grad_norm", "learning_rate", "time/step"];
const HELD_OUT = "eval/", SMOOTH = "curves are smooth";

// makeCurves(runs, remember) -> {node, update(metrics), ask(), end()}. runs: [{id, label, place}]. metrics: [{name,
// meaning, group}]. remember: under which name this browser keeps the choice of curves.
export function makeCurves(runs, remember) {
  const key = `curves ${remember}`;
  const view = {runs, key, metrics: [], charts: new Map(), version: 0, picked: JSON.parse(localStorage.getItem(key))};
  view.summary = make("summary");
  view.groups = make("div.metric-groups");
  view.grid = make(localStorage.getItem(SMOOTH) ? "div.charts.smooth" : "div.charts");
  view.fault = make("p.fault", {role: "status"});
  view.load = paced(() => load(view), {node: view.grid, fail: (fault) => put(view.fault, fault.message)});
  const smooth = make("input", {type: "checkbox", id: "smooth", checked: localStorage.getItem(SMOOTH), onchange: () =>
    localStorage.setItem(SMOOTH, view.grid.classList.toggle("smooth") ? "1" : "")});
  const node = make("details.part", {open: !isNarrow()}, make("summary", {}, make("h2", {id: "curves"}, "Curves")),
    make("details.picker", {}, view.summary, view.groups),
    make("label.check", {}, smooth, " Smooth the lines (the values stay faintly behind)"), view.fault, view.grid);
  const update = onChange((metrics) => {
    view.metrics = metrics;
    fillPicker(view);
    arrangeCharts(view);
  });
  const ask = () => {
    view.version += 1;
    view.load();
  };
  return {node, update, ask, end: all(view.load.end, () => view.charts.forEach((chart) => chart.end()))};
}

// The metrics that get a chart: a held-out one is drawn into the chart of its namesake, where there is one.
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
  return (known.length ? known : metrics).slice(0, MAX_AT_FIRST).map((metric) => metric.name);
}

function chosen(view) {
  const metrics = charted(view.metrics), names = new Set(metrics.map((metric) => metric.name));
  const picked = (view.picked ?? []).filter((name) => names.has(name));
  return picked.length ? picked : atFirst(metrics);
}

function fillPicker(view) {
  const open = chosen(view);
  const groups = Map.groupBy(charted(view.metrics), ({name, group}) => group || name.split("/")[0]);
  const onchange = (event) => pick(view, event.target);
  const choice = ({name, meaning}) => make("label", {title: meaning || null},
    make("input", {type: "checkbox", value: name, checked: open.includes(name), onchange}), ` ${titleOf(name)} `,
    titleOf(name) === name ? "" : make("code", {}, name));
  view.groups.replaceChildren(...[...groups].map(([group, metrics]) =>
    make("fieldset", {}, make("legend", {}, group), ...metrics.map(choice))));
}

function pick(view, box) {
  const open = chosen(view);
  view.picked = box.checked ? [...open, box.value] : open.filter((name) => name !== box.value);
  localStorage.setItem(view.key, JSON.stringify(view.picked));
  if (!view.picked.length) fillPicker(view); // those shown at first come back
  arrangeCharts(view);
}

function arrangeCharts(view) {
  const names = chosen(view), metrics = new Map(view.metrics.map((metric) => [metric.name, metric]));
  for (const [name, chart] of view.charts) {
    if (names.includes(name)) continue;
    chart.end();
    view.charts.delete(name);
  }
  for (const name of names) if (!view.charts.has(name)) view.charts.set(name, openChart(view, metrics.get(name)));
  arrange(view.grid, names.map((name) => view.charts.get(name).node));
  const most = charted(view.metrics).length;
  put(view.summary, most ? `Choose curves: ${names.length} of ${most} shown` : "No metrics yet");
}

function openChart(view, metric) {
  const chart = makeChart(metric);
  const opened = {...chart, version: -1, isSeen: false};
  const endSeeing = watchSeen(chart.node, (isSeen) => {
    opened.isSeen = isSeen;
    if (isSeen && opened.version < view.version) view.load();
  });
  opened.end = all(endSeeing, chart.end);
  return opened;
}

async function load(view) {
  const due = [...view.charts.values()].filter((chart) => chart.isSeen && chart.version < view.version);
  if (!due.length) return;
  const version = view.version, known = new Set(view.metrics.map((metric) => metric.name));
  const names = due.flatMap(({name}) => [name, ...known.has(HELD_OUT + name) ? [HELD_OUT + name] : []]).join(",");
  const histories = await Promise.all(view.runs.map(({id}) => get("history", {id, names, points: MAX_POINTS})));
  for (const chart of due) {
    chart.update(view.runs.flatMap((run, i) => [seriesOf(run, histories[i], chart.name, false),
      seriesOf(run, histories[i], HELD_OUT + chart.name, true)]).filter(Boolean));
    chart.version = version;
  }
  put(view.fault, [...new Set(histories.flatMap((history) => history.notes))].join("\n"));
}

function seriesOf(run, history, name, isHeldOut) {
  const values = history.series[name];
  if (!values?.steps.length) return null;
  // the two curves of one run differ in colour too; of several runs each has one colour
  const place = isHeldOut && !run.label ? run.place + 1 : run.place;
  const isSparse = isHeldOut || name.startsWith(HELD_OUT);
  return {...values, key: `${run.id} ${name}`, run: run.id, label: run.label, place, isSparse};
}
