// The page of all runs: the queue, and the runs as trees. A row is made once and then changed in place, so that focus,
// choice and scroll stay when news arrive.

import {all, arrange, button, keyed, make, put, putAttribute, putState} from "./dom.js";
import {address, age, breakable, bytes, count, duration, headline, moment} from "./format.js";
import {makeQueue} from "./jobs.js";
import {get, on, paced} from "./server.js";
import {welcome} from "./start.js";

const TITLES = ["Choose", "Run", "Stage", "State", "Steps", "Result", "Started", "Took", "On disk"];
const NUMBERS = new Set(["Steps", "Took", "On disk"]);
const MINUTE = 60000;
const chosen = new Set(); // ids; kept while another page is open

export async function show(root) {
  const view = {rows: [], lines: new Map()}, queue = makeQueue(); // lines: id -> line
  build(view, root, queue);
  const fail = (fault) => put(view.fault, fault.message);
  const load = paced(() => fill(view), {wait: 1000, fail});
  const step = (news) => {
    view.lines.get(news.id)?.showStep(news.step);
    load();
  };
  const showAges = () => view.lines.forEach(({cells, row}) => put(cells.Started, age(row.started)));
  const clock = setInterval(() => document.hidden || showAges(), MINUTE);
  await fill(view).catch(fail);
  return all(on("runs open", load), on("run", step), load.end, queue.end, () => clearInterval(clock));
}

function build(view, root, queue) {
  view.where = make("p.quiet");
  view.fault = make("p.fault", {role: "status"});
  view.empty = make("div", {hidden: true}, make("p.quiet", {}, "There is no run in this folder yet. Runs that are "
    + "started in a terminal are shown here too, if their output_dir is in this folder."));
  view.find = make("input", {type: "search", id: "find-run", autocomplete: "off", oninput: () => filter(view)});
  view.finder = make("div.line", {hidden: true}, make("label", {for: "find-run"}, "Find "), view.find);
  view.found = make("p.hidden", {role: "status"});
  const head = make("tr", {role: "row"}, ...TITLES.map((title) => make(NUMBERS.has(title) ? "th.number" : "th",
    {scope: "col", role: "columnheader"}, title === "Choose" ? make("span.hidden", {}, title) : title)));
  view.heads = [make("caption.hidden", {}, "Runs, those made from others below them"),
    make("thead", {role: "rowgroup"}, head)];
  view.table = make("table.runs", {role: "table", hidden: true}, ...view.heads);
  view.chosenText = make("span", {role: "status"});
  view.compare = make("a.button.primary", {}, "Compare");
  view.choice = make("div.choice", {hidden: true}, view.chosenText, view.compare,
    button("Choose none", () => chooseNone(view)));
  view.groups = keyed(() => makeGroup(view));
  root.className = "runs-part";
  root.append(make("h1", {}, "Runs"), view.where, view.fault, queue.node, view.empty, view.finder, view.found,
    view.table, view.choice);
}

async function fill(view) {
  const {runs, notes = [], folder, ...sizes} = await get("runs"), groups = folders(runs);
  view.rows = runs;
  put(view.fault, notes.join("\n"));
  const size = `${bytes(sizes.bytes)}; ${bytes(sizes.free)} free on the disk`;
  put(view.where, `${count(runs.length, "run")} in ${folder}, ${size}`);
  view.empty.hidden = runs.length > 0;
  if (!runs.length && view.empty.childElementCount === 1) view.empty.prepend(welcome("h2"));
  view.table.hidden = !runs.length;
  view.finder.hidden = runs.length < 10 && !view.find.value;
  view.isOne = groups.length === 1 && !groups[0].folder; // then no folder needs a name
  view.top = folder.split("/").at(-1);
  const bodies = view.groups(groups, (group) => group.folder);
  arrange(view.table, [...view.heads, ...bodies.map((body) => body.node)]);
  const ids = new Set(runs.map((row) => row.id));
  for (const id of chosen) if (!ids.has(id)) chosen.delete(id);
  showChoice(view);
  filter(view);
}

function makeGroup(view) {
  const title = make("th", {scope: "rowgroup", role: "rowheader", colspan: TITLES.length});
  const head = make("tr.group", {role: "row"}, title), node = make("tbody", {role: "rowgroup"});
  const lines = keyed(() => makeLine(view));
  return {node, end: () => lines([], () => ""), update(group) {
    const rows = lines(group.lines.map((line) => ({...line, folder: group.folder})), (line) => line.row.id);
    put(title, group.folder || view.top);
    arrange(node, [...view.isOne ? [] : [head], ...rows.map((line) => line.node)]);
  }};
}

function makeLine(view) {
  const box = make("input", {type: "checkbox", onchange: () => {
    if (box.checked) chosen.add(line.row.id);
    else chosen.delete(line.row.id);
    showChoice(view);
  }});
  const parts = {box, trail: make("span.quiet"), link: make("a"), others: make("span.quiet.others"),
    state: make("span.state"), alarms: make("span.alarms"), error: make("span.fault.why")};
  const inside = {Choose: [box], Run: [parts.trail, parts.link, parts.others],
    State: [parts.state, parts.error, parts.alarms]};
  const cells = Object.fromEntries(TITLES.map((title) => [title, make(NUMBERS.has(title) ? "td.number" : "td",
    {role: "cell", "data-title": title}, ...inside[title] ?? [])]));
  const line = {...parts, cells, node: make("tr.run", {role: "row"}, ...Object.values(cells))};
  line.showStep = (step) => {
    if (Number.isInteger(step) && step > (line.row.step ?? -1)) put(cells.Steps, stepText({...line.row, step}));
  };
  line.end = () => view.lines.get(line.row.id) === line && view.lines.delete(line.row.id);
  line.update = (data) => updateLine(view, line, data);
  return line;
}

function updateLine(view, line, {row, depth, trail, others, folder}) {
  const within = (id) => folder && id.startsWith(`${folder}/`) ? id.slice(folder.length + 1) : id;
  line.row = row;
  view.lines.set(row.id, line);
  putAttribute(line.box, "aria-label", `Choose ${row.id}`);
  line.box.checked = chosen.has(row.id);
  line.cells.Run.style.setProperty("--depth", depth);
  put(line.trail, trail.map((id) => `${within(id)} → `).join(""));
  if (line.link.textContent !== within(row.id)) line.link.replaceChildren(...breakable(within(row.id)));
  putAttribute(line.link, "href", `#/run/${address(row.id)}`);
  putAttribute(line.link, "aria-label", row.id);
  put(line.others, others.length ? `from ${others.map(within).join(", ")}` : "");
  putState(line.state, row.status);
  put(line.alarms, row.alarms && !row.error ? count(row.alarms, "alarm") : ""); // an error comes first
  put(line.error, row.error ?? "");
  putAttribute(line.error, "title", row.error || null);
  putAttribute(line.cells.Started, "title", moment(row.started));
  // In tenths: with "0.33 s" the column is wider than with "4.3 s", results wrap, and all rows move a second later.
  const took = row.seconds ? duration(Math.round(row.seconds * 10) / 10) : "";
  const texts = {Stage: row.stage ?? "", Steps: stepText(row), Result: headline(row), Started: age(row.started),
    Took: took, "On disk": bytes(row.bytes)};
  for (const [title, text] of Object.entries(texts)) put(line.cells[title], text);
}

function stepText({step, max_steps: most}) {
  if (step === null || step === undefined) return "";
  return most && step !== most ? `${step} of ${most}` : String(step);
}

function chooseNone(view) {
  for (const id of chosen) view.lines.get(id).box.checked = false;
  chosen.clear();
  showChoice(view);
  view.table.querySelector("input[type=checkbox]")?.focus();
}

function showChoice(view) {
  const ids = view.rows.map((row) => row.id).filter((id) => chosen.has(id));
  view.choice.hidden = !ids.length;
  put(view.chosenText, ids.length ? `${count(ids.length, "run")} chosen` : "");
  put(view.compare, ids.length === 1 ? "Compare with others" : `Compare ${ids.length} runs`);
  putAttribute(view.compare, "href", `#/compare/${ids.map(address).join(",")}`);
}

// Hide rows without the words in the search field, and folders without any row left.
function filter(view) {
  const words = view.find.value.toLowerCase().split(/\s+/).filter(Boolean);
  let many = 0;
  for (const {row, node} of view.lines.values()) {
    const text = `${row.id} ${row.stage} ${row.status}`.toLowerCase();
    node.hidden = !words.every((word) => text.includes(word));
    many += !node.hidden;
  }
  for (const body of view.table.tBodies) body.hidden = !body.querySelector("tr.run:not([hidden])");
  put(view.found, words.length ? `${count(many, "run")} found` : "");
}

// ---- runs as trees by parent: a line (sft, reward, ppo) stays a line; only where it branches it is indented

// rows -> [{folder, lines: [{row, depth, trail, others}]}], the folder with the newest run first, and in it the newest
// tree. folder: what the ids of its trees begin with. trail: the ids before it in its line. others: further parents.
function folders(rows) {
  const children = new Map(), parents = chosenParents(rows);
  const oldestFirst = [...rows].sort((a, b) => order(a.started, b.started) || order(a.id, b.id));
  for (const row of oldestFirst) {
    const parent = parents.get(row.id);
    if (parent) children.set(parent, [...children.get(parent) ?? [], row]);
  }
  const trees = oldestFirst.filter((row) => !parents.get(row.id)).map((root) => tree(root, children));
  const byFolder = new Map();
  for (const {folder, lines} of trees.sort((a, b) => order(b.newest, a.newest))) {
    byFolder.set(folder, [...byFolder.get(folder) ?? [], ...lines]);
  }
  return [...byFolder].map(([folder, lines]) => ({folder, lines}));
}

const order = (a, b) => a === b ? 0 : (a ?? "") < (b ?? "") ? -1 : 1;

function tree(root, children) {
  const lines = [];
  // above: the ids of the lines that this one stands under
  const walk = (row, depth, trail, above) => {
    const from = children.get(row.id) ?? [], shown = [...above, ...trail, row.id];
    lines.push({row, depth, trail, others: (row.parents ?? []).filter((id) => !shown.includes(id))});
    if (from.length === 1) walk(from[0], depth, [...trail, row.id], above);
    else for (const child of from) walk(child, depth + 1, [], shown);
  };
  walk(root, 0, [], []);
  const newest = lines.map(({row}) => row.started ?? "").sort().at(-1);
  return {folder: commonFolder(lines.map(({row}) => row.id)), lines, newest};
}

// id -> the parent that it stands under: of several the one with the longest line above it, so that it is one line.
function chosenParents(rows) {
  const byId = new Map(rows.map((row) => [row.id, row])), heights = new Map(), parents = new Map();
  const height = (id) => {
    if (heights.has(id)) return heights.get(id);
    heights.set(id, 0); // a run that is its own ancestor stands under none of these
    const known = (byId.get(id).parents ?? []).filter((parent) => parent !== id && byId.has(parent));
    for (const parent of known) {
      const far = 1 + height(parent);
      if (far <= heights.get(id) || isUnder(parent, id)) continue;
      heights.set(id, far);
      parents.set(id, parent);
    }
    return heights.get(id);
  };
  const isUnder = (id, other) => id === other || parents.has(id) && isUnder(parents.get(id), other);
  rows.forEach(({id}) => height(id));
  return parents;
}

function commonFolder(ids) {
  const paths = ids.map((id) => id.split("/").slice(0, -1));
  const end = paths[0].findIndex((part, i) => paths.some((path) => path[i] !== part));
  return (end < 0 ? paths[0] : paths[0].slice(0, end)).join("/");
}
