// Jobs: the queue of those that run and wait, those that have ended, and what a job writes.

import {all, arrange, button, fold, keyed, make, put, putAttribute, putState, textBlock} from "./dom.js";
import {address, age, duration} from "./format.js";
import {get, on, paced, post} from "./server.js";

const MAX_OUTPUT = 200000; // characters that stay on the page

export const isOpen = (job) => ["running", "queued"].includes(job.state);
export const hasFailed = (job) => ["failed", "lost"].includes(job.state);

// A job's state in words.
export function jobText(job) {
  if (job.state === "queued") return job.place ? `waiting, number ${job.place}` : "waiting";
  if (job.state === "running") return `running, started ${age(job.started) || "just now"}`;
  const took = Date.parse(job.finished) - Date.parse(job.started);
  const when = `${job.state} ${age(job.finished ?? job.created)}`;
  return Number.isFinite(took) ? `${when}, took ${duration(took / 1000)}` : when;
}

// makeQueue() -> {node, end()}; hidden where there has never been a job.
export function makeQueue() {
  const view = {open: make("ul.jobs"), ended: make("ul.jobs"), fault: make("p.fault", {role: "status"})};
  view.endedPart = fold("", view.ended);
  view.node = make("section", {"aria-labelledby": "queue-title", hidden: true},
    make("h2", {id: "queue-title"}, "Queue"), view.open, view.fault, view.endedPart);
  view.items = keyed(makeItem);
  const load = paced(() => fill(view), {fail: (fault) => {
    view.node.hidden = false;
    put(view.fault, fault.message);
  }});
  load();
  return {node: view.node, end: all(on("jobs open", load), load.end, () => view.items([], (job) => job.id))};
}

async function fill(view) {
  const {jobs} = await get("jobs");
  put(view.fault, "");
  view.node.hidden = !jobs.length;
  const items = view.items(jobs, (job) => job.id);
  const nodes = (test) => items.filter((_, i) => test(jobs[i])).map((item) => item.node);
  const ended = nodes((job) => !isOpen(job));
  arrange(view.open, [...nodes((job) => job.state === "running"), ...nodes((job) => job.state === "queued")]);
  arrange(view.ended, ended);
  view.endedPart.hidden = !ended.length;
  put(view.endedPart.firstChild, `Ended: ${ended.length}`);
}

function makeItem({id}) {
  const job = makeJob(id), name = make("span.job-title"), link = make("a", {}, "its run");
  const node = make("li.card.job", {}, make("div.line", {}, name, job.state, link, job.stop), job.error, job.output);
  return {node, end: job.end, update(row) {
    job.update(row);
    put(name, row.title || id);
    link.hidden = !row.run;
    if (row.run) link.href = `#/run/${address(row.run)}`;
    putAttribute(job.stop, "aria-label", `${job.stop.textContent}: ${row.title || id}`);
  }};
}

// makeJob(job id) -> {state, error, stop, output, update(job), end()}: the nodes that show a job. title, hear: see
// `makeJobOutput`.
export function makeJob(id, title, hear) {
  const state = make("span.state"), error = make("p.fault.said", {role: "status", hidden: true});
  const output = makeJobOutput(id, title, hear);
  const showError = (text) => {
    put(error, text ?? "");
    error.hidden = !text;
  };
  let hasAsked = false;
  const stop = button("", async () => {
    try {
      await post("job/stop", {id});
      hasAsked = true;
      put(stop, "End at once");
      showError("");
    } catch (fault) {
      showError(fault.message);
    }
  });
  return {state, error, stop, output: output.node, end: output.end, showError, update(job) {
    putState(state, job.state, jobText(job));
    showError(job.error);
    stop.hidden = !isOpen(job);
    if (!hasAsked) put(stop, job.state === "queued" ? "Drop" : "Stop");
  }};
}

// makeJobOutput(job id) -> {node, end()}: the end of what a job writes, and what comes while it is looked at.
// Closed at first, and nothing is read before it is opened. hear(text): called with all the text whenever it grows.
export function makeJobOutput(id, title = "Output", hear = () => {}) {
  const pre = textBlock("", title), fault = make("p.fault", {role: "status"});
  const cut = make("p.quiet", {hidden: true}, "Only the end is shown here; the job's folder has all of it.");
  const node = fold(title, cut, pre, fault);
  let text = "", next = null;
  const load = paced(async () => {
    const {output, next: end} = await get("job", {id, ...(next !== null && {after: next})});
    next = end;
    put(fault, "");
    text += output;
    if (text.length > MAX_OUTPUT) cut.hidden = false;
    text = text.slice(-MAX_OUTPUT);
    const isAtEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 8;
    put(pre, text || "Nothing yet.");
    if (isAtEnd) pre.scrollTop = pre.scrollHeight;
    if (!output) return;
    hear(text);
    load(); // one answer holds 64 KiB at most
  }, {node: pre, fail: (error) => put(fault, error.message)});
  const look = () => node.open && load();
  node.addEventListener("toggle", look);
  return {node, end: all(on("job", (job) => job.id === id && look()), on("open", look), load.end)};
}
