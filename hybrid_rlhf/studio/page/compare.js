// Several runs beside each other: curves over each other, the settings that differ, and the same prompts.

import {swatch} from "./chart.js";
import {makeCurves} from "./curves.js";
import {all, button, make, onChange, put, table} from "./dom.js";
import {address, breakable, count, headline} from "./format.js";
import {sideBySide} from "./samples.js";
import {get, on, paced, postConfirmed} from "./server.js";

const MAX_RUNS = 8; // as many as there are colours

export async function show(root, rest) {
  const named = [...new Set(rest.split(",").filter(Boolean))];
  if (!named.length) throw new Error("no run is named; choose some under Runs");
  const ids = named.slice(0, MAX_RUNS), labels = shortLabels(ids);
  const fetched = () => get("compare", {ids: ids.join(",")});
  const {runs} = await get("runs"), first = await fetched();
  const curves = makeCurves(ids.map((id, place) => ({id, place, label: labels[place]})), "compared");
  const view = {ids, labels, fault: make("p.fault", {role: "status"}), message: make("p.quiet", {role: "status"})};
  const rows = make("ul.compared"), settings = make("div"), prompts = make("div");
  const filling = (place, nodes) => onChange((value) => place.replaceChildren(...nodes(view, value)));
  const parts = {runs: filling(rows, runNodes), differ: filling(settings, settingsNodes),
    prompts: filling(prompts, promptNodes)};
  const fill = (comparison) => {
    curves.update(comparison.metrics);
    put(view.fault, "");
    for (const [name, update] of Object.entries(parts)) update(comparison[name]); // what is read or chosen stays
  };
  root.className = "runs-part";
  root.append(make("h1", {}, "Compare"), rows, chooser(view, runs), view.message, view.fault,
    ids.length > 1 ? curves.node : make("p", {}, "Choose another run to see both beside each other."), settings, prompts);
  fill(first);
  if (named.length > MAX_RUNS) {
    put(view.message, `${MAX_RUNS} runs at most are compared; these are the first of ${named.length}`);
  }
  curves.ask();
  const fail = (error) => put(view.fault, error.message);
  const load = paced(async () => fill(await fetched()), {wait: 2000, fail});
  const grown = all(curves.ask, load);
  return all(on("run", (news) => ids.includes(news.id) && grown()), on("runs", load), on("open", grown), load.end,
    curves.end);
}

// The ids of the runs without the folder that all have in common.
function shortLabels(ids) {
  const paths = ids.map((id) => id.split("/"));
  let same = 0;
  while (paths.every((path) => path.length > same + 1 && path[same] === paths[0][same])) same += 1;
  return paths.map((path) => path.slice(same).join("/"));
}

const addressOf = (ids) => `#/compare/${ids.map(address).join(",")}`;

// A box that adds a run, and the button that has all of them answer the same prompts.
function chooser({ids, message, fault}, runs) {
  const others = runs.filter((row) => !ids.includes(row.id));
  const add = make("select", {id: "add-run", disabled: ids.length >= MAX_RUNS, onchange: () => put(message, "")},
    new Option("choose a run", ""), ...others.map((row) => new Option(row.id, row.id)));
  const go = button("Add", () => {
    if (add.value) location.hash = addressOf([...ids, add.value]);
    else put(message, "Choose a run beside this button first.");
  });
  const evaluate = button("Evaluate on the same prompts", async () => {
    try {
      const job = await postConfirmed("jobs", {kind: "evaluate", runs: ids, settings: {}});
      put(fault, "");
      put(message, `In the queue: ${job.title || job.id}. Its result will be a run of its own.`);
    } catch (error) {
      put(message, "");
      put(fault, error.message);
    }
  }, {class: "primary", hidden: ids.length < 2});
  return make("div.buttons", {}, make("label", {for: "add-run"}, "Another run ", add), go, evaluate);
}

function runNodes({ids}, rows) {
  return rows.map((row, place) => {
    const others = ids.filter((id) => id !== row.id);
    return make("li", {}, swatch(place), make("a", {href: `#/run/${address(row.id)}`}, ...breakable(row.id)),
      make("span.quiet", {}, row.stage), make(`span.state.${row.status}`, {}, row.status),
      make("span", {}, row.step === null ? "" : count(row.step, "step")), make("span", {}, headline(row)),
      others.length ? make("a.quiet", {href: addressOf(others), "aria-label": `leave out ${row.id}`}, "leave out")
        : null);
  });
}

function settingsNodes({ids, labels}, differ) {
  if (ids.length < 2) return [];
  const title = "Settings that differ";
  if (!differ.length) return [make("h2", {}, title), make("p.quiet", {}, "None: the runs have the same settings.")];
  const text = (value) => value === null ? "not set" : typeof value === "string" ? value : JSON.stringify(value);
  const columns = labels.map((label, i) => ({title: label, kind: ".said", cell: ({values}) => text(values[i])}));
  const head = {title: "Setting", isHead: true, cell: ({option}) => option};
  return [make("h2", {}, title), table([head, ...columns], differ, title, "table.differ")];
}

function promptNodes({ids, labels}, prompts) {
  if (ids.length < 2 || !prompts.length) return []; // a single run has nothing beside it yet
  return [make("h2", {}, "The same prompts"), ...prompts.map(({prompt, answers}) =>
    sideBySide(prompt, answers.map((sample, i) => ({title: titleOf(labels[i], sample), sample}))))];
}

// A running run's answers are of an earlier step than a finished one's.
const titleOf = (label, sample) => Number.isFinite(sample?.step) ? `${label}, step ${sample.step}` : label;
