// The queue: jobs that run and wait, each with its output and a button that ends it, and those that have ended.

import {make} from "./dom.js";
import {address, age, duration} from "./format.js";
import {arrange, keyed, put} from "./in_place.js";
import {makeJobOutput} from "./job_output.js";
import {paced} from "./paced.js";
import {get, on, post} from "./server.js";

const OPEN = ["running", "queued"];

// makeQueue() -> {node, end()}; hidden where there has never been a job.
export function makeQueue() {
  const view = {};
  view.open = make("ul.jobs");
  view.ended = make("ul.jobs");
  view.endedSummary = make("summary");
  view.endedPart = make("details", {}, view.endedSummary, view.ended);
  view.fault = make("p.fault", {role: "status"});
  view.node = make("section", {"aria-labelledby": "queue-title", hidden: true},
    make("h2", {id: "queue-title"}, "Queue"), view.open, view.fault, view.endedPart);
  view.items = keyed((job) => makeJob(job, view));
  const load = paced(() => fill(view), {fail: (fault) => tellFault(view, fault)});
  const endings = ["jobs", "open"].map((name) => on(name, load));
  load();
  return {node: view.node, end: () => {
    [...endings, load.end].forEach((end) => end());
    view.items([], (job) => job.id);
  }};
}

function tellFault(view, fault) {
  view.node.hidden = false;
  put(view.fault, fault.message);
}

async function fill(view) {
  const {jobs} = await get("jobs");
  put(view.fault, "");
  view.node.hidden = !jobs.length;
  const items = view.items(jobs, (job) => job.id);
  const nodes = (test) => items.filter((_, i) => test(jobs[i])).map((item) => item.node);
  const open = [...nodes((job) => job.state === "running"), ...nodes((job) => job.state === "queued")];
  const ended = nodes((job) => !OPEN.includes(job.state));
  arrange(view.open, open);
  arrange(view.ended, ended);
  view.endedPart.hidden = !ended.length;
  put(view.endedSummary, `Ended: ${ended.length}`);
}

// The words for a job's state, and whether they are bad news.
export function jobWords(job) {
  if (job.state === "queued") return job.place ? `waiting, number ${job.place}` : "waiting";
  if (job.state === "running") return `running, started ${age(job.started) || "just now"}`;
  const took = Date.parse(job.finished) - Date.parse(job.started);
  const when = `${job.state} ${age(job.finished ?? job.created)}`;
  return Number.isFinite(took) ? `${when}, took ${duration(took / 1000)}` : when;
}

function makeJob(first, view) {
  const state = make("span.state"), error = make("p.fault"), stop = make("button", {type: "button"});
  const name = make("span.job-title", {}, first.title || first.id);
  const link = make("a", {}, "its run"), output = makeJobOutput(first.id);
  const node = make("li.card.job", {}, make("div.line", {}, name, state, link, stop), error, output.node);
  let hasAsked = false;
  stop.addEventListener("click", async () => {
    try {
      await post("job/stop", {id: first.id});
      hasAsked = true;
      put(stop, "End at once");
      put(view.fault, "");
    } catch (fault) {
      put(view.fault, fault.message);
    }
  });
  return {node, end: output.end, update(job) {
    put(name, job.title || job.id);
    put(state, jobWords(job));
    state.className = `state ${job.state}`;
    link.hidden = !job.run;
    if (job.run) link.href = `#/run/${address(job.run)}`;
    stop.hidden = !OPEN.includes(job.state);
    if (!hasAsked) put(stop, job.state === "queued" ? "Drop" : "Stop");
    stop.setAttribute("aria-label", `${stop.textContent}: ${job.title || job.id}`);
    put(error, job.error && job.state !== "done" ? job.error : "");
    error.hidden = !error.textContent;
  }};
}
