// Several runs beside each other: curves over each other, the settings that differ, and the same prompts.

import {swatch} from "./chart.js";
import {makeCurves} from "./curves.js";
import {make} from "./dom.js";
import {address, breakable, count, headline} from "./format.js";
import {put} from "./in_place.js";
import {paced} from "./paced.js";
import {sideBySide} from "./samples.js";
import {get, on, postConfirmed} from "./server.js";

const MOST = 8; // runs: as many as there are colours

export async function show(root, rest) {
  const ids = [...new Set(rest.split(",").filter(Boolean))];
  if (!ids.length) throw new Error("no run is named; choose some under Runs");
  const used = ids.slice(0, MOST);
  const all = (await get("runs")).runs;
  const view = {ids: used, all, found: await fetched(used)};
  const labels = shortLabels(used);
  view.curves = makeCurves(used.map((id, place) => ({id, place, label: labels[place]})), "compared");
  build(view, root, labels);
  if (ids.length > MOST) put(view.told, `${MOST} runs at most are compared; these are the first of ${ids.length}`);
  view.curves.update(view.found.metrics);
  view.curves.ask();
  const load = paced(() => refresh(view), {wait: 2000, fail: (fault) => put(view.fault, fault.message)});
  const isOurs = ({id}) => used.includes(id);
  const endings = [on("run", (news) => isOurs(news) && [view.curves.ask(), load()]), on("runs", load),
    on("open", () => [view.curves.ask(), load()]), load.end, view.curves.end];
  return () => endings.forEach((end) => end());
}

// A single run has nothing beside it yet.
async function fetched(ids) {
  if (ids.length > 1) return get("compare", {ids: ids.join(",")});
  return {runs: [(await get("run", {id: ids[0]})).row], differ: [], prompts: [], metrics: []};
}

// What tells the runs apart: their ids without the folder that all have in common.
function shortLabels(ids) {
  const parts = ids.map((id) => id.split("/"));
  let same = 0;
  while (parts.every((each) => each.length > same + 1 && each[same] === parts[0][same])) same += 1;
  return parts.map((each) => each.slice(same).join("/"));
}

function build(view, root, labels) {
  view.labels = labels;
  view.fault = make("p.fault", {role: "status"});
  view.told = make("p.quiet", {role: "status"});
  view.runs = make("ul.compared");
  view.settings = make("div");
  view.prompts = make("div");
  root.className = "runs-part";
  root.append(make("h1", {}, "Compare"), view.runs, chooser(view), view.told, view.fault,
    view.ids.length > 1 ? curvesNode(view) : make("p", {}, "Choose another run to see both beside each other."),
    view.settings, view.prompts);
  fill(view);
}

const curvesNode = ({curves}) => make("section", {"aria-labelledby": "curves"},
  make("h2", {id: "curves"}, "Curves"), curves.node);
const addressOf = (ids) => `#/compare/${ids.map(address).join(",")}`;

// A box that adds a run, and the button that has all of them answer the same prompts.
function chooser(view) {
  const others = view.all.filter((row) => !view.ids.includes(row.id));
  const add = make("select", {id: "add-run", disabled: view.ids.length >= MOST}, new Option("choose a run", ""),
    ...others.map((row) => new Option(row.id, row.id)));
  add.addEventListener("change", () => put(view.told, ""));
  const go = make("button", {type: "button", onclick: () => {
    if (add.value) location.hash = addressOf([...view.ids, add.value]);
    else put(view.told, "Choose a run beside this button first.");
  }}, "Add");
  const evaluate = make("button.primary", {type: "button", onclick: async () => {
    try {
      const job = await postConfirmed("jobs", {kind: "evaluate", runs: view.ids, settings: {}});
      put(view.fault, "");
      put(view.told, `In the queue: ${job.title || job.id}. Its result will be a run of its own.`);
    } catch (fault) {
      put(view.told, "");
      put(view.fault, fault.message);
    }
  }}, "Evaluate on the same prompts");
  evaluate.hidden = view.ids.length < 2;
  return make("div.buttons", {}, make("label", {for: "add-run"}, "Another run ", add), go, evaluate);
}

async function refresh(view) {
  view.found = await fetched(view.ids);
  view.curves.update(view.found.metrics);
  fill(view);
}

function fill(view) {
  put(view.fault, (view.found.notes ?? []).join("\n"));
  once(view, "runs", view.found.runs, (rows) =>
    view.runs.replaceChildren(...rows.map((row, i) => runNode(view, row, i))));
  once(view, "settings", view.found.differ, (differ) => view.settings.replaceChildren(...settingsNodes(view, differ)));
  once(view, "prompts", view.found.prompts, (prompts) => view.prompts.replaceChildren(...promptNodes(view, prompts)));
}

// Call `change` where `value` is another one than the last time, so that what is read or chosen stays.
function once(view, name, value, change) {
  const text = JSON.stringify(value);
  view.last ??= {};
  if (view.last[name] === text) return;
  view.last[name] = text;
  change(value);
}

function runNode(view, row, place) {
  const others = view.ids.filter((id) => id !== row.id);
  return make("li", {}, swatch(place), make("a", {href: `#/run/${address(row.id)}`}, ...breakable(row.id)),
    make("span.quiet", {}, row.stage), make(`span.state.${row.status}`, {}, row.status),
    make("span", {}, row.step === null ? "" : count(row.step, "step")), make("span", {}, headline(row)),
    others.length ? make("a.quiet", {href: addressOf(others), "aria-label": `leave out ${row.id}`}, "leave out")
      : null);
}

function settingsNodes(view, differ) {
  if (view.ids.length < 2) return [];
  const title = make("h2", {}, "Settings that differ");
  if (!differ.length) return [title, make("p.quiet", {}, "None: the runs have the same settings.")];
  const text = (value) => value === null ? "not set" : typeof value === "string" ? value : JSON.stringify(value);
  const head = make("tr", {}, ...["Setting", ...view.labels].map((label) => make("th", {scope: "col"}, label)));
  const rows = differ.map(({option, values}) => make("tr", {}, make("th", {scope: "row"}, option),
    ...values.map((value) => make("td.said", {}, text(value)))));
  const caption = make("caption.hidden", {}, "Settings that differ");
  return [title, make("div.scroller", {tabindex: "0", role: "region", "aria-label": "Settings that differ"},
    make("table.differ", {}, caption, make("thead", {}, head), make("tbody", {}, ...rows)))];
}

function promptNodes(view, prompts) {
  if (!prompts.length) return [];
  return [make("h2", {}, "The same prompts"), ...prompts.map(({prompt, answers}) =>
    sideBySide(prompt, answers.map((sample, i) => ({title: titleOf(view.labels[i], sample), sample}))))];
}

// A running run's answers are of an earlier step than a finished one's.
const titleOf = (label, sample) => Number.isFinite(sample?.step) ? `${label}, step ${sample.step}` : label;
