// The page of one run: how it stands, what can be done with it, its curves, what the model says, and how it was made.

import {makeCurves} from "./curves.js";
import {make} from "./dom.js";
import {address, age, breakable, count, duration, moment} from "./format.js";
import {put, putAttribute} from "./in_place.js";
import {makeJobOutput} from "./job_output.js";
import {paced} from "./paced.js";
import {makeDetails} from "./run_details.js";
import {jobWords} from "./queue.js";
import {makeSamples} from "./samples.js";
import {get, on, post, postConfirmed} from "./server.js";

const SECONDS = "time/step"; // the metric by which the time left is reckoned
const NO_CHAT = ["reward", "evaluate"];
const CAN_RESUME = ["stopped", "failed", "lost"];

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

function showRun(root, id, found) {
  const view = {id, found, hasAskedToStop: false, perStep: null, output: null};
  view.curves = makeCurves([{id, label: "", place: 0}], view.found.row.stage);
  view.samples = makeSamples(id);
  view.details = makeDetails();
  build(view, root);
  update(view);
  const isMine = (load) => (news) => news.id === id && load();
  const load = paced(() => refresh(view), {fail: (fault) => put(view.fault, fault.message), wait: 1000});
  const jobs = paced(() => findJob(view), {wait: 1000}); // the queue's own faults stand on the page of runs
  const grown = isMine(() => [load, view.curves.ask, view.samples.ask].forEach((ask) => ask()));
  const all = () => [load, view.curves.ask, view.samples.ask, jobs].forEach((ask) => ask());
  const endings = [on("run", grown), on("runs", load), on("jobs", jobs), on("open", all), load.end, jobs.end,
    view.curves.end, view.samples.end, () => view.output?.end()];
  view.load = load;
  load();
  jobs();
  return () => endings.forEach((end) => end());
}

// The newest job that makes this run, or goes on with it.
async function jobOf(id) {
  const {jobs} = await get("jobs");
  return jobs.find((job) => job.run === id && ["train", "evaluate"].includes(job.kind)) ?? null;
}

// A run that is in the queue, or has just begun: it has no folder yet. As soon as it has one this becomes its page.
function showWaiting(root, id, first) {
  const state = make("span.state"), error = make("p.fault.said");
  const output = makeJobOutput(first.id, "Output of its process");
  const ends = [];
  const leave = () => ends.splice(0).forEach((end) => end());
  const stop = make("button", {type: "button", onclick: () =>
    post("job/stop", {id: first.id}).catch((fault) => put(error, fault.message))});
  const again = make("a.button", {href: "#/new"}, "Change the settings");
  const tell = (job) => {
    stop.hidden = !["queued", "running"].includes(job.state);
    put(stop, job.state === "queued" ? "Drop" : "Stop");
    again.hidden = !stop.hidden;
    put(state, jobWords(job));
    putAttribute(state, "class", `state ${job.state}`);
    put(error, job.error ?? "");
    if (["failed", "lost"].includes(job.state)) output.node.open = true;
  };
  const look = paced(async () => {
    const found = await get("run", {id}).catch((fault) => {
      if (fault.status !== 404) throw fault;
      return null;
    });
    const job = found ? null : await jobOf(id);
    if (job) tell(job);
    if (!found || !ends.length) return;
    leave();
    root.replaceChildren();
    ends.push(showRun(root, id, found));
  }, {wait: 1000, fail: (fault) => put(error, fault.message)});
  ends.push(...["runs", "run", "jobs", "job", "open"].map((name) => on(name, look)), look.end, output.end);
  root.append(make("h1.run-name", {}, ...breakable(id)), make("p.line", {}, state), error,
    make("p.quiet", {}, "This run has not written anything yet."), make("div.buttons", {}, stop, again), output.node);
  tell(first);
  return leave;
}

function build(view, root) {
  view.state = make("span.state");
  view.about = make("span.quiet");
  view.bar = make("progress", {"aria-label": "Steps", hidden: true});
  view.steps = make("span");
  view.error = make("p.fault.said", {hidden: true});
  view.alarms = make("ul.alarm-list", {hidden: true, "aria-label": "Alarms"});
  view.family = make("p.family", {hidden: true});
  view.fault = make("p.fault", {role: "status"});
  view.notes = make("p.fault.said", {role: "status"});
  view.told = make("p.quiet", {role: "status"});
  view.waiting = make("p.quiet", {role: "status"});
  view.outputPlace = make("div");
  buildButtons(view);
  root.append(make("h1.run-name", {}, ...breakable(view.id)), make("p.line", {}, view.state, view.about),
    make("p.line", {}, view.bar, view.steps), view.error, view.alarms, view.family, view.buttons, view.told, view.fault,
    view.notes, view.waiting, view.outputPlace,
    make("section", {"aria-labelledby": "curves"}, make("h2", {id: "curves"}, "Curves"), view.curves.node),
    view.samples.node, view.details.node);
}

function buildButtons(view) {
  const {id} = view;
  const link = (text, href) => make("a.button", {href}, text);
  view.stop = make("button", {type: "button", onclick: () =>
    act(view, "run/stop", "It ends after this step, with a checkpoint to go on from.")});
  view.resume = make("button.primary", {type: "button", onclick: () =>
    act(view, "run/resume", "It goes on from its last checkpoint as soon as the queue is free.")}, "Resume");
  view.talk = link("Talk", `#/talk?model=${encodeURIComponent(id)}`);
  view.take = link("Take away", `#/take?run=${encodeURIComponent(id)}`);
  view.compare = link("Compare", `#/compare/${address(id)}`);
  view.fresh = link("New run from it", `#/new?model=${encodeURIComponent(id)}`);
  view.report = make("a.button",
    {href: `api/report?${new URLSearchParams({id})}`, target: "_blank", rel: "noopener"}, "Report");
  view.buttons = make("div.buttons", {},
    view.stop, view.resume, view.talk, view.compare, view.fresh, view.take, view.report);
}

async function act(view, path, done) {
  try {
    await postConfirmed(path, {id: view.id});
    if (path === "run/stop") view.hasAskedToStop = true;
    put(view.fault, "");
    put(view.told, done);
    view.refusal = null;
  } catch (fault) {
    put(view.told, "");
    put(view.fault, fault.message);
    view.refusal = {text: fault.message, status: view.found.row.status};
  }
  update(view);
  view.load();
}

async function refresh(view) {
  view.found = await get("run", {id: view.id});
  if (view.found.row.status === "running") view.perStep = await secondsPerStep(view.id);
  if (view.refusal?.status !== view.found.row.status) view.refusal = null; // what was refused stays until things change
  put(view.fault, view.refusal?.text ?? "");
  update(view);
}

// Seconds that a step takes lately, without the first ones, in which compilers and caches warm up; null where unknown.
async function secondsPerStep(id) {
  const {series} = await get("history", {id, names: SECONDS, points: 40});
  const lately = (series[SECONDS]?.mean ?? []).filter(Number.isFinite).slice(1).slice(-8);
  return lately.length ? lately.reduce((sum, value) => sum + value, 0) / lately.length : null;
}

function update(view) {
  const {row} = view.found, isRunning = row.status === "running";
  if (!isRunning && view.hasAskedToStop) put(view.told, "");
  if (!isRunning) view.hasAskedToStop = false;
  putAttribute(view.state, "class", `state ${row.status}`);
  put(view.state, row.status);
  put(view.about, aboutWords(row));
  putAttribute(view.about, "title", moment(row.started));
  putSteps(view, row);
  put(view.notes, (view.found.notes ?? []).join("\n"));
  view.error.hidden = !row.error;
  put(view.error, row.error ?? "");
  putAlarms(view);
  putFamily(view);
  view.stop.hidden = !isRunning;
  view.resume.hidden = !CAN_RESUME.includes(row.status);
  view.talk.hidden = NO_CHAT.includes(row.stage) || !(row.has_model || view.found.checkpoints.length);
  view.curves.node.parentNode.hidden = !view.found.metrics.length;
  view.take.hidden = view.fresh.hidden = !row.has_model;
  view.report.hidden = !view.found.has_report;
  put(view.stop, view.hasAskedToStop ? "End at once" : "Stop with a checkpoint");
  view.curves.update(view.found.metrics);
  view.details.update(view.found);
  view.curves.ask();
}

function aboutWords(row) {
  const took = row.seconds ? `${row.status === "running" ? "for" : "took"} ${duration(row.seconds)}` : "";
  return [`stage ${row.stage}`, row.started ? `started ${age(row.started)}` : "", took].filter(Boolean).join(" · ");
}

// The time left is that of the steps, and at most what the run has been given.
function secondsLeft({perStep}, {step, max_steps: most, max_seconds: given, seconds}) {
  const bySteps = perStep && most > step ? perStep * (most - step) : Infinity;
  return Math.min(bySteps, given ? Math.max(0, given - seconds) : Infinity);
}

function putSteps(view, row) {
  const {step, max_steps: most, status} = row, rest = status === "running" ? secondsLeft(view, row) : Infinity;
  view.bar.hidden = !(most && step !== null && status !== "finished");
  if (!view.bar.hidden) {
    view.bar.max = most;
    view.bar.value = Math.min(step, most);
  }
  const left = Number.isFinite(rest) ? `, about ${duration(rest)} left` : "";
  const isWithin = most && step !== most;
  const none = status === "running" ? "no step yet" : "";
  put(view.steps, step === null ? none : isWithin ? `step ${step} of ${most}${left}` : count(step, "step"));
}

function putAlarms(view) {
  const {alarms} = view.found, text = JSON.stringify(alarms);
  if (text === view.alarmText) return;
  view.alarmText = text;
  view.alarms.hidden = !alarms.length;
  view.alarms.replaceChildren(...alarms.map(({name, text: what}) =>
    make("li", {}, make("strong", {}, name), `: ${what}`)));
}

// From whom it was made, and what was made from it.
function putFamily(view) {
  const {row: {parents = []}, children} = view.found;
  const text = JSON.stringify([parents, children]);
  if (text === view.familyText) return;
  view.familyText = text;
  const linked = (id) => (view.found.known ?? []).includes(id) ? make("a", {href: `#/run/${address(id)}`}, id) : id;
  const listed = (ids) => ids.flatMap((id, i) => [i ? ", " : "", linked(id)]);
  view.family.hidden = !(parents.length || children.length);
  view.family.replaceChildren(...parents.length ? ["Made from ", ...listed(parents)] : [],
    parents.length && children.length ? "; " : "", ...children.length ? ["used by ", ...listed(children)] : []);
}

// The newest job of this run, and what it writes.
async function findJob(view) {
  const job = await jobOf(view.id);
  put(view.waiting, job?.state === "queued" ? `In the queue: ${jobWords(job)}.` : "");
  if (!job || view.output?.id === job.id) return;
  view.output?.end();
  const shown = makeJobOutput(job.id, "Output of its process");
  view.output = {id: job.id, end: shown.end};
  view.outputPlace.replaceChildren(shown.node);
}
