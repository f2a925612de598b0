// The page of all runs: the queue, and the runs as trees. A row is made once and then changed in place, so that focus,
// choice and scroll stay when news arrive.

import {make} from "./dom.js";
import {address, age, breakable, bytes, count, duration, headline, moment} from "./format.js";
import {arrange, keyed, put, putAttribute} from "./in_place.js";
import {paced} from "./paced.js";
import {makeQueue} from "./queue.js";
import {folders} from "./run_tree.js";
import {get, on} from "./server.js";

const TITLES = ["Choose", "Run", "Stage", "State", "Steps", "Result", "Started", "Took", "On disk"];
const NUMBERS = new Set(["Steps", "Took", "On disk"]);
const MINUTE = 60000;
const chosen = new Set(); // ids; kept while another page is open

export async function show(root) {
  const view = {rows: [], queue: makeQueue()};
  build(view, root);
  const load = paced(() => fill(view), {wait: 1000, fail: (fault) => put(view.fault, fault.message)});
  const step = ({id, step: now}) => {
    view.lines.get(id)?.tellStep(now);
    load();
  };
  const endings = [on("runs", load), on("open", load), on("run", step), load.end, view.queue.end];
  const clock = setInterval(() => document.hidden || tellAges(view), MINUTE);
  try {
    await fill(view);
  } catch (fault) {
    put(view.fault, fault.message);
  }
  return () => {
    clearInterval(clock);
    endings.forEach((end) => end());
  };
}

function build(view, root) {
  view.lines = new Map(); // id -> line
  view.where = make("p.quiet");
  view.fault = make("p.fault", {role: "status"});
  view.empty = make("p", {hidden: true}, "There is no run in this folder yet. ",
    make("a", {href: "#/new"}, "Begin a new run"), ": choose what the model is to learn, and from which "
    + "data. Runs that are started in a terminal are shown here too, if their output_dir is in this folder.");
  view.find = make("input", {type: "search", id: "find-run", autocomplete: "off", oninput: () => filter(view)});
  view.finder = make("div.line", {hidden: true}, make("label", {for: "find-run"}, "Find "), view.find);
  view.found = make("p.hidden", {role: "status"});
  const head = make("tr", {role: "row"}, ...TITLES.map((title) => make(NUMBERS.has(title) ? "th.number" : "th",
    {scope: "col", role: "columnheader"}, title === "Choose" ? make("span.hidden", {}, title) : title)));
  view.head = make("thead", {role: "rowgroup"}, head);
  view.caption = make("caption.hidden", {}, "Runs, those made from others below them");
  view.table = make("table.runs", {role: "table", hidden: true}, view.caption, view.head);
  buildChoice(view);
  view.groups = keyed(() => makeGroup(view));
  root.className = "runs-part";
  root.append(make("h1", {}, "Runs"), view.where, view.fault, view.queue.node, view.empty, view.finder, view.found,
    view.table, view.choice);
}

function buildChoice(view) {
  view.chosenText = make("span", {role: "status"});
  view.compare = make("a.button.primary", {}, "Compare");
  const none = make("button", {type: "button", onclick: () => {
    for (const id of chosen) view.lines.get(id)?.check(false);
    chosen.clear();
    tellChoice(view);
    view.table.querySelector("input[type=checkbox]")?.focus();
  }}, "Choose none");
  view.choice = make("div.choice", {hidden: true}, view.chosenText, view.compare, none);
}

async function fill(view) {
  const found = await get("runs"), groups = folders(found.runs);
  view.rows = found.runs;
  put(view.fault, (found.notes ?? []).join("\n"));
  const sizes = `${bytes(found.bytes)}; ${bytes(found.free)} free on the disk`;
  put(view.where, `${count(found.runs.length, "run")} in ${found.folder}, ${sizes}`);
  view.empty.hidden = found.runs.length > 0;
  view.table.hidden = !found.runs.length;
  view.finder.hidden = found.runs.length < 10 && !view.find.value;
  view.isOne = groups.length === 1 && !groups[0].folder; // then no folder needs a name
  view.top = found.folder.split("/").at(-1);
  const bodies = view.groups(groups, (group) => group.folder);
  arrange(view.table, [view.caption, view.head, ...bodies.map((body) => body.node)]);
  const ids = new Set(found.runs.map((row) => row.id));
  for (const id of chosen) if (!ids.has(id)) chosen.delete(id);
  tellChoice(view);
  filter(view);
}

function makeGroup(view) {
  const title = make("th", {scope: "rowgroup", role: "rowheader", colspan: TITLES.length});
  const head = make("tr.group", {role: "row"}, title), node = make("tbody", {role: "rowgroup"});
  const lines = keyed(() => makeLine(view));
  return {node, end: () => lines([], () => ""), update(group) {
    const all = lines(group.lines.map((line) => ({...line, folder: group.folder})), (line) => line.row.id);
    put(title, group.folder || view.top);
    arrange(node, [...view.isOne ? [] : [head], ...all.map((line) => line.node)]);
  }};
}

function makeLine(view) {
  const line = {};
  const box = make("input", {type: "checkbox", onchange: () => {
    if (box.checked) chosen.add(line.row.id);
    else chosen.delete(line.row.id);
    tellChoice(view);
  }});
  const cell = (name, ...inside) =>
    make(NUMBERS.has(name) ? "td.number" : "td", {role: "cell", "data-title": name}, ...inside);
  const trail = make("span.quiet"), link = make("a"), others = make("span.quiet.others");
  const state = make("span.state"), alarms = make("span.alarms"), error = make("span.fault.why");
  const [stage, steps, result, started, took, disk] =
    ["Stage", "Steps", "Result", "Started", "Took", "On disk"].map((name) => cell(name));
  line.node = make("tr.run", {role: "row"}, cell("Choose", box), cell("Run", trail, link, others), stage,
    cell("State", state, alarms, error), steps, result, started, took, disk);
  Object.assign(line, {box, trail, link, others, state, alarms, error, stage, steps, result, started, took, disk});
  line.check = (isChosen) => (box.checked = isChosen);
  line.tellStep = (step) => {
    if (Number.isInteger(step) && step > (line.row.step ?? -1)) put(steps, stepWords({...line.row, step}));
  };
  line.end = () => view.lines.get(line.row.id) === line && view.lines.delete(line.row.id);
  line.update = (now) => updateLine(view, line, now);
  return line;
}

function updateLine(view, line, {row, depth, trail, others, folder}) {
  line.row = row;
  view.lines.set(row.id, line);
  const within = (id) => folder && id.startsWith(`${folder}/`) ? id.slice(folder.length + 1) : id;
  putAttribute(line.box, "aria-label", `Choose ${row.id}`);
  line.box.checked = chosen.has(row.id);
  line.link.parentNode.style.setProperty("--depth", depth);
  put(line.trail, trail.map((id) => `${within(id)} → `).join(""));
  if (line.link.textContent !== within(row.id)) line.link.replaceChildren(...breakable(within(row.id)));
  putAttribute(line.link, "href", `#/run/${address(row.id)}`);
  putAttribute(line.link, "aria-label", row.id);
  put(line.others, others.length ? `from ${others.map(within).join(", ")}` : "");
  put(line.stage, row.stage ?? "");
  putAttribute(line.state, "class", `state ${row.status}`);
  put(line.state, row.status);
  put(line.alarms, row.alarms ? count(row.alarms, "alarm") : "");
  put(line.error, row.error ?? "");
  putAttribute(line.error, "title", row.error || null);
  put(line.steps, stepWords(row));
  put(line.result, headline(row));
  put(line.started, age(row.started));
  putAttribute(line.started, "title", moment(row.started));
  // In tenths: with "0.33 s" the column is wider than with "4.3 s", results wrap, and all rows move a second later.
  put(line.took, row.seconds ? duration(Math.round(row.seconds * 10) / 10) : "");
  put(line.disk, bytes(row.bytes));
}

function stepWords({step, max_steps: most}) {
  if (step === null || step === undefined) return "";
  return most && step !== most ? `${step} of ${most}` : String(step);
}

function tellAges(view) {
  for (const line of view.lines.values()) put(line.started, age(line.row.started));
}

function tellChoice(view) {
  const ids = view.rows.map((row) => row.id).filter((id) => chosen.has(id));
  view.choice.hidden = !ids.length;
  put(view.chosenText, ids.length ? `${count(ids.length, "run")} chosen` : "");
  put(view.compare, ids.length === 1 ? "Compare with others" : `Compare ${ids.length} runs`);
  putAttribute(view.compare, "href", `#/compare/${ids.map(address).join(",")}`);
}

// Rows without the words that are looked for are hidden, and trees without any row.
function filter(view) {
  const words = view.find.value.toLowerCase().split(/\s+/).filter(Boolean);
  let many = 0;
  for (const line of view.lines.values()) {
    const text = `${line.row.id} ${line.row.stage} ${line.row.status}`.toLowerCase();
    line.node.hidden = !words.every((word) => text.includes(word));
    many += !line.node.hidden;
  }
  for (const body of view.table.tBodies) body.hidden = ![...body.querySelectorAll("tr.run")].some((row) => !row.hidden);
  put(view.found, words.length ? `${count(many, "run")} found` : "");
}
