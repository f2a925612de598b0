// The page of one run: its state, what can be done with it, its curves and samples, and how it was made.

import {makeCurves} from "./curves.js";
import {
  all, bars, button, copyButton, fold, list, make, onChange, put, putAttribute, putState, table, textBlock
} from "./dom.js";
import {address, age, breakable, bytes, count, duration, moment} from "./format.js";
import {hasFailed, isOpen, jobText, makeJob, makeJobOutput} from "./jobs.js";
import {inWords} from "./run_words.js";
import {makeReplay} from "./replay.js";
import {makeSamples} from "./samples.js";
import {get, on, paced, post, postConfirmed} from "./server.js";

const SECONDS = "time/step"; // the metric from which the time left is estimated
const NO_CHAT = ["reward", "evaluate"];
const CAN_RESUME = ["stopped", "failed", "lost"];
const TALKED = "chat"; // the stage of a run that learns in Talk, which is where it ends and goes on

export async function show(root, id) {
  if (!id) throw new Error("no run is named; choose one under Runs");
  document.title = `${id} - hybrid_rlhf`;
  root.className = "runs-part";
  try {
    return showRun(root, id, await get("run", {id}));
  } catch (fault) {
    const job = fault.status === 404 ? await jobOf(id).catch(() => null) : null;
    if (!job) throw fault;
    return showWaiting(root, id, job);
  }
}

// The newest job that makes this run, or resumes it.
async function jobOf(id) {
  const {jobs} = await get("jobs");
  return jobs.find((job) => job.run === id && ["train", "evaluate"].includes(job.kind)) ?? null;
}

// A run that is in the queue, or has just begun: it has no folder yet. As soon as it has one this becomes its page.
function showWaiting(root, id, first) {
  const job = makeJob(first.id, "Output of its process"), ends = [];
  const leave = () => ends.splice(0).forEach((end) => end());
  const again = make("a.button", {href: "#/new"}, "Change the settings");
  const update = (row) => {
    job.update(row);
    again.hidden = isOpen(row);
    if (hasFailed(row)) job.output.open = true;
  };
  const look = paced(async () => {
    const record = await get("run", {id}).catch((fault) => {
      if (fault.status !== 404) throw fault;
      return null;
    });
    const row = record ? null : await jobOf(id);
    if (row) update(row);
    if (!record || !ends.length) return;
    leave();
    root.replaceChildren();
    ends.push(showRun(root, id, record));
  }, {wait: 1000, fail: (fault) => job.showError(fault.message)});
  ends.push(on("runs run jobs job open", look), look.end, job.end);
  root.append(make("h1.run-name", {}, ...breakable(id)), make("p.line", {}, job.state), job.error,
    make("p.quiet", {}, "This run has not written anything yet."), make("div.buttons", {}, job.stop, again),
    job.output);
  update(first);
  return leave;
}

function showRun(root, id, record) {
  const view = {id, record, hasAskedToStop: false, perStep: null, output: null};
  view.curves = makeCurves([{id, label: "", place: 0}], record.row.stage);
  view.samples = makeSamples(id);
  view.details = makeDetails();
  view.replay = makeReplay(id);
  build(view, root);
  update(view);
  view.load = paced(() => refresh(view), {fail: (fault) => put(view.fault, fault.message), wait: 1000});
  const jobs = paced(() => findJob(view), {wait: 1000}); // the page of runs shows faults of the queue
  const grown = all(view.load, view.curves.ask, view.samples.ask);
  view.load();
  jobs();
  return all(on("run", (news) => news.id === id && grown()), on("runs", view.load), on("jobs", jobs),
    on("open", all(grown, jobs)), view.load.end, jobs.end, view.curves.end, view.samples.end, view.replay.end,
    () => view.output?.end());
}

function build(view, root) {
  const {id} = view, query = new URLSearchParams({id});
  const link = (text, href) => make("a.button", {href}, text);
  const act = (path, message) => () => change(view, path, message);
  view.state = make("span.state");
  view.about = make("span.quiet");
  view.bar = make("progress", {"aria-label": "Steps", hidden: true});
  view.steps = make("span");
  view.error = make("p.fault.said", {hidden: true});
  view.alarms = make("ul.alarm-list", {hidden: true, "aria-label": "Alarms"});
  view.family = make("p.family", {hidden: true});
  view.fault = make("p.fault", {role: "status"});
  view.notes = make("p.fault.said", {role: "status"});
  view.message = make("p.quiet", {role: "status"});
  view.waiting = make("p.quiet", {role: "status"});
  view.outputPlace = make("div");
  view.stop = button("", act("run/stop", "It ends after this step, with a checkpoint to go on from."));
  view.resume = button("Resume", act("run/resume",
    "It goes on from its last checkpoint as soon as the queue is free."), {class: "primary"});
  view.talk = link("Talk", `#/talk?model=${encodeURIComponent(id)}`);
  view.export = link("Export", `#/export?run=${encodeURIComponent(id)}`);
  view.fresh = link("New run from it", `#/new?model=${encodeURIComponent(id)}`);
  view.report = make("a.button", {href: `api/report?${query}`, target: "_blank", rel: "noopener"}, "Report");
  view.hints = make("p.quiet");
  view.words = make("section", {hidden: true}, make("h2", {}, "In words"), make("ul"));
  view.putAlarms = onChange((alarms) => putAlarms(view, alarms));
  view.putFamily = onChange((family) => putFamily(view, family));
  root.append(make("h1.run-name", {}, ...breakable(id)), make("p.line", {}, view.state, view.about),
    make("p.line", {}, view.bar, view.steps), view.error, view.alarms, view.hints,
    view.family, make("div.buttons", {}, view.stop, view.resume, view.talk,
      link("Compare", `#/compare/${address(id)}`), view.fresh, view.export, view.report),
    view.message, view.fault, view.notes, view.waiting, view.outputPlace, view.samples.answers, view.words,
    view.curves.node, view.samples.node, view.details.node, view.replay.node, keeping(view));
}

// Another name for the run, or its end; asked again where that breaks something.
function keeping(view) {
  const input = make("input", {id: "rename", value: view.id, autocomplete: "off", spellcheck: "false"});
  const users = () => view.record.children.length ? ` ${view.record.children.join(", ")} was made from it, and will not `
    + "find it." : "";
  const send = async (question, body, to) => {
    if (question && !confirm(question)) return;
    try {
      await post("run/move", {id: view.id, ...body});
      location.hash = to;
    } catch (fault) {
      put(view.moved, fault.message);
    }
  };
  const rename = (name) => send(users() && `Rename ${view.id}?${users()}`, {name}, `#/run/${address(name)}`);
  view.moved = make("p.fault", {role: "alert"});
  return fold("Rename or delete", make("div.line", {}, make("label", {for: "rename"}, "Name "), input,
    button("Rename", () => rename(input.value.trim())), button("Delete this run", () => send(`Delete ${view.id}, its `
      + `model and checkpoints (${bytes(view.record.row.bytes)})? It cannot be brought back.${users()}`, {}, "#/runs"))),
  view.moved);
}

async function change(view, path, message) {
  try {
    await postConfirmed(path, {id: view.id});
    if (path === "run/stop") view.hasAskedToStop = true;
    view.refusal = null;
    view.said = view.record.row.status; // the message is about this state, and goes with it
    put(view.fault, "");
    put(view.message, message);
  } catch (fault) {
    view.refusal = {text: fault.message, status: view.record.row.status};
    put(view.message, "");
    put(view.fault, fault.message);
  }
  update(view);
  view.load();
}

async function refresh(view) {
  view.record = await get("run", {id: view.id});
  if (view.record.row.status === "running") view.perStep = await secondsPerStep(view.id);
  const words = await inWords(view.id, view.record);
  view.words.lastChild.replaceChildren(...words);
  view.words.hidden = !words.length;
  if (view.refusal?.status !== view.record.row.status) view.refusal = null; // it stays until the state changes
  put(view.fault, view.refusal?.text ?? "");
  update(view);
}

// Mean seconds of the newest steps, without the first ones, in which compilers and caches warm up; null where unknown.
async function secondsPerStep(id) {
  const {series} = await get("history", {id, names: SECONDS, points: 40});
  const newest = (series[SECONDS]?.mean ?? []).filter(Number.isFinite).slice(1).slice(-8);
  return newest.length ? newest.reduce((sum, value) => sum + value, 0) / newest.length : null;
}

function update(view) {
  const {record, record: {row}} = view, isRunning = row.status === "running";
  if (view.said !== row.status) put(view.message, "");
  if (!isRunning) view.hasAskedToStop = false;
  putState(view.state, row.status);
  put(view.about, aboutText(row));
  putAttribute(view.about, "title", moment(row.started));
  putSteps(view, row);
  put(view.notes, (record.notes ?? []).join("\n"));
  put(view.hints, record.hints?.knows ?? "");
  view.error.hidden = !row.error;
  put(view.error, row.error ?? "");
  view.putAlarms(record.alarms);
  view.putFamily([row.parents ?? [], record.children, record.known ?? []]);
  view.stop.hidden = !isRunning || row.stage === TALKED;
  view.resume.hidden = !CAN_RESUME.includes(row.status) || row.stage === TALKED;
  view.talk.hidden = NO_CHAT.includes(row.stage) || !(row.has_model || record.checkpoints.length);
  view.curves.node.hidden = !record.metrics.length;
  view.replay.node.hidden = !record.metrics.some(({name}) => name === "completions/mean_length"); // it samples
  view.export.hidden = view.fresh.hidden = !row.has_model;
  view.report.hidden = !record.has_report;
  put(view.stop, view.hasAskedToStop ? "End at once" : "Stop with a checkpoint");
  view.curves.update(record.metrics);
  view.details.update(record);
  view.curves.ask();
}

function aboutText(row) {
  const took = row.seconds ? `${row.status === "running" ? "for" : "took"} ${duration(row.seconds)}` : "";
  return [`stage ${row.stage}`, row.started ? `started ${age(row.started)}` : "", took].filter(Boolean).join(" · ");
}

// The time left for the steps, at most what is left of the run's time limit.
function secondsLeft(perStep, {step, max_steps: most, max_seconds: limit, seconds}) {
  const bySteps = perStep && most > step ? perStep * (most - step) : Infinity;
  return Math.min(bySteps, limit ? Math.max(0, limit - seconds) : Infinity);
}

function putSteps(view, row) {
  const {step, max_steps: most, status} = row, isRunning = status === "running";
  view.bar.hidden = !(most && step !== null && status !== "finished");
  if (!view.bar.hidden) Object.assign(view.bar, {max: most, value: Math.min(step, most)});
  const rest = isRunning ? secondsLeft(view.perStep, row) : Infinity;
  const left = Number.isFinite(rest) ? `, about ${duration(rest)} left` : "";
  const none = isRunning ? "no step yet" : "";
  const done = most && step !== most ? `step ${step} of ${most}${left}` : count(step ?? 0, "step");
  put(view.steps, step === null ? none : done);
}

function putAlarms(view, alarms) {
  view.alarms.hidden = !alarms.length;
  const texts = alarms.map(({text}) => text).join(" "), namesOption = /[a-z]\.[a-z]/.test(texts);
  view.alarms.replaceChildren(...alarms.map(({name, text}) => make("li", {}, make("strong", {}, name), `: ${text}`)),
    namesOption ? make("li", {}, optionHelp(view.record.row.stage, texts)) : "");
}

// A fold with the help of the options that a text names; the studio is asked when it is opened.
function optionHelp(stage, text) {
  const node = fold("What these options mean", make("p.quiet", {}, "Looking them up …"));
  node.addEventListener("toggle", async () => {
    const {options} = await get("options", {stage}).catch((fault) => ({options: [{name: "", help: fault.message}]}));
    const named = options.filter(({name}) => !name || name.includes(".") && text.includes(name));
    node.lastChild.replaceWith(named.length ? list(named.map(({name, help}) => [make("strong", {}, name), ` ${help}`]))
      : make("p.quiet", {}, "They name none of this stage."));
  }, {once: true});
  return node;
}

// The runs that this one was made from, and those made from it.
function putFamily(view, [parents, children, known]) {
  const linked = (id) => known.includes(id) ? make("a", {href: `#/run/${address(id)}`}, id) : id;
  const listed = (title, ids) => ids.flatMap((id, i) => [i ? ", " : title, linked(id)]);
  view.family.hidden = !(parents.length || children.length);
  view.family.replaceChildren(...listed("Parents: ", parents), parents.length && children.length ? "; " : "",
    ...listed("used by ", children));
}

// Show the newest job of this run, and its output.
async function findJob(view) {
  const job = await jobOf(view.id);
  put(view.waiting, job?.state === "queued" ? `In the queue: ${jobText(job)}.` : "");
  if (!job || view.output?.id === job.id) return;
  view.output?.end();
  view.output = {id: job.id, ...makeJobOutput(job.id, "Output of its process")};
  view.outputPlace.replaceChildren(view.output.node);
}

// ---- details: evaluation, time and memory by phase, the command, checkpoints, settings, versions, the model's card

// makeDetails() -> {node, update(record)}. A part is made again only where its content has changed, and stays open.
function makeDetails() {
  const folded = (name, title, fill) => part(({[name]: value}) => value,
    (value) => value.length ? [fold(title, fill(value))] : []);
  const parts = [
    part(({evaluation}) => evaluation, (text) => text ? markdown(text, "Evaluation") : []),
    part(({phases, memory}) => [phases, memory], ([phases, memory]) => [
      ...ranked("Where the time went", phases, "seconds", duration, "Seconds by phase"),
      ...ranked("Most memory, by part and phase", memory, "bytes", bytes, "Memory by part and phase")]),
    folded("header", "What it began with", (header) => list(header, "ul.plain")),
    part(({command}) => command, (command) => command ? commandNodes(command) : []),
    folded("checkpoints", "Checkpoints", checkpointTable),
    folded("settings", "Settings", (text) => textBlock(text, "Settings")),
    part(({versions}) => Object.entries(versions).sort(),
      (rows) => rows.length ? [fold("Versions", versionTable(rows))] : []),
    folded("card", "Model card", (text) => textBlock(text, "Model card"))];
  const node = make("div", {}, ...parts.map((section) => section.node));
  return {node, update: (record) => parts.forEach((section) => section.update(record))};
}

function part(read, fill) {
  const node = make("section");
  const update = onChange((value) => {
    const open = [...node.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent);
    node.replaceChildren(...fill(value ?? ""));
    node.hidden = !node.children.length;
    for (const line of node.querySelectorAll("summary")) line.parentNode.open = open.includes(line.textContent);
  });
  return {node, update: (record) => update(read(record))};
}

function ranked(title, phases, key, text, caption) {
  const rows = phases.filter((row) => row[key] > 0).sort((a, b) => b[key] - a[key]);
  const shown = rows.map((row) => ({name: row.name, value: row[key], text: text(row[key])}));
  return rows.length ? [fold(title, bars(shown, caption))] : [];
}

function commandNodes(command) {
  const message = make("span.quiet", {role: "status"}), text = textBlock(command, "Command", "pre.command");
  const copy = copyButton(text, (line) => put(message, line));
  return [make("h2", {}, "The command that does the same"), make("div", {}, text, make("div.line", {}, copy, message))];
}

const checkpointTable = (checkpoints) => table([
  {title: "Name", cell: (row) => row.name}, {title: "Step", cell: (row) => String(row.step ?? ""), isNumber: true},
  {title: "On disk", cell: (row) => bytes(row.bytes), isNumber: true},
  {title: "Note", cell: (row) => row.is_best ? "best so far" : ""}], checkpoints, "Checkpoints");

const versionTable = (versions) => table([{title: "Package", cell: ([name]) => name},
  {title: "Version", cell: ([, text]) => String(text)}], versions, "Versions");

// A report that the library writes as Markdown, as nodes: headings, tables, lists, paragraphs.
function markdown(text, caption) {
  return text.trim().split(/\n\s*\n/).map((block) => {
    const lines = block.split("\n"), heading = /^(#+) (.*)/.exec(lines[0]);
    if (heading) return make(heading[1].length > 1 ? "h3" : "h2", {}, plain(heading[2]));
    if (lines.length > 1 && lines.every((line) => line.startsWith("|"))) return markdownTable(lines, caption);
    if (!lines.every((line) => line.startsWith("- "))) return make("p.said", {}, plain(block));
    return list(lines.map((line) => plain(line.slice(2))));
  });
}

// Cells are parted by | without a backslash before it.
function markdownTable([head, , ...rows], caption) {
  const cells = (line) => line.split(/(?<!\\)\|/).slice(1, -1).map((cell) => plain(cell.trim()));
  const columns = cells(head).map((title, i) => ({title, cell: (row) => row[i] ?? ""}));
  return table(columns, rows.map(cells), caption);
}

const plain = (text) => text.replace(/<br>/g, "\n").replace(/\\([\\`*_{}[\]()#+.!|<>~-])/g, "$1")
  .replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&")
  .replace(/\*\*([^*]+)\*\*/g, "$1").replace(/`([^`]+)`/g, "$1");
