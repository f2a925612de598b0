// A minute's look at whether there is anything to learn from: a job, whose output is followed here.

import {make} from "./dom.js";
import {get, on, post} from "./server.js";

const ENDS = ["done", "failed", "stopped", "lost"];
const WORDS = {queued: "It waits for its turn", running: "It runs", done: "Done", failed: "It failed", stopped: "Stopped", lost: "Lost: its process has ended"};

// Show the job `id` in `place` until it ends or leave() is called, which it returns.
export function follow(id, place) {
  const state = make("p", {role: "status"});
  const verdicts = make("div");
  const output = make("pre.output", {tabindex: "0", role: "log", "aria-label": "Output of the check", "aria-live": "off"});
  const stop = make("button", {type: "button", onclick: () => post("job/stop", {id}).catch((fault) => (state.textContent = fault.message))}, "Stop the check");
  place.replaceChildren(state, verdicts, make("details", {open: true}, make("summary", {}, "Its output"), output), make("div.buttons", {}, stop));
  const seen = {text: "", next: null, isBusy: false, isAgain: false};
  const look = async () => {
    if (seen.isBusy) return void (seen.isAgain = true);
    seen.isBusy = true;
    try {
      do {
        seen.isAgain = false;
        await read(id, seen, {state, verdicts, output, stop});
      } while (seen.isAgain);
    } catch (fault) {
      state.textContent = fault.message;
    }
    seen.isBusy = false;
  };
  const ends = [on("job", (news) => news.id === id && look()), on("jobs", look), on("open", look)];
  look();
  return () => ends.forEach((end) => end());
}

async function read(id, seen, {state, verdicts, output, stop}) {
  const answer = await get("job", seen.next === null ? {id} : {id, after: seen.next});
  seen.isAgain ||= seen.next !== null && answer.next !== seen.next && answer.output.length >= 65536;
  seen.next = answer.next;
  seen.text = `${seen.text}${plain(answer.output)}`.slice(-200000);
  const {job} = answer;
  state.textContent = `${WORDS[job.state] ?? job.state}${job.place ? `, number ${job.place} in the queue` : ""}${job.error ? `: ${job.error}` : "."}`;
  state.className = job.state === "failed" || job.state === "lost" ? "fault" : "";
  stop.hidden = ENDS.includes(job.state);
  output.textContent = seen.text;
  output.scrollTop = output.scrollHeight;
  verdicts.replaceChildren(...[...seen.text.matchAll(/^verdict: (.*)$/gm)].map(([, text]) => make("p.verdict", {}, text)));
}

// Without a terminal's colours, and with what a carriage return would have written over left out.
const plain = (text) => text.replaceAll(/\x1b\[[0-9;?]*[A-Za-z]/g, "").replaceAll(/[^\n]*\r(?!\n)/g, "");
