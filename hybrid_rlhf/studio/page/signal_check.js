// A minute's look at whether there is anything to learn from: a job, whose state, verdict and output are followed here.

import {make} from "./dom.js";
import {button} from "./field_frame.js";
import {put} from "./in_place.js";
import {makeJobOutput} from "./job_output.js";
import {jobWords} from "./queue.js";
import {get, on, post} from "./server.js";

// Show the job `id` in `place` until what this returns is called.
export function follow(id, place) {
  const state = make("p", {role: "status"});
  const verdicts = make("div", {role: "status"});
  const tellVerdicts = (text) => {
    const found = [...text.matchAll(/^verdict: (.*)$/gm)];
    verdicts.replaceChildren(...found.map(([, line]) => make("p.verdict", {}, line)));
  };
  const output = makeJobOutput(id, "Output of the check", tellVerdicts);
  const stop = button("Stop the check", () => post("job/stop", {id}).catch((fault) => put(state, fault.message)));
  const look = async () => {
    const job = (await get("jobs").catch(() => ({jobs: []}))).jobs.find((each) => each.id === id);
    if (!job) return;
    const hasEnded = !["queued", "running"].includes(job.state);
    put(state, `The check: ${jobWords(job)}${job.error ? `: ${job.error}` : "."}`);
    state.className = ["failed", "lost"].includes(job.state) ? "fault" : "";
    stop.hidden = hasEnded;
    if (hasEnded) output.node.open = true; // its verdict is read from there
  };
  place.replaceChildren(state, verdicts, output.node, make("div.buttons", {}, stop));
  output.node.open = true;
  const ends = [on("jobs", look), on("open", look), output.end];
  look();
  return () => ends.forEach((end) => end());
}
