// The first screen: what this is, three ways in, and the loop of training.

import {button, make, put, tell, tellFault} from "./dom.js";
import {address, freeName} from "./format.js";
import {get, post} from "./server.js";

export function show(root) {
  root.className = "runs-part";
  root.append(welcome("h1"));
}

// The first screen as a node; the page of runs shows it where there is no run yet. heading: h1 or h2.
export function welcome(heading) {
  const about = make("p", {}, "Looking for a small model …"), go = button("Start the example", () => begin(go),
    {class: "primary"});
  const example = get("example").then((found) => {
    put(about, found.about);
    return found;
  });
  example.catch((fault) => put(about, fault.message));
  async function begin(pressed) {
    if (pressed.getAttribute("aria-disabled")) return;
    pressed.setAttribute("aria-disabled", "true");
    tell("Starting …");
    try {
      const [{stage, settings, run: stem}, {runs}, {jobs}] = await Promise.all([example, get("runs"), get("jobs")]);
      const run = freeName(stem, (name) => runs.some((row) => row.id === name) || jobs.some((job) => job.run === name));
      await post("jobs", {kind: "train", stage, settings, run});
      location.hash = `#/run/${address(run)}`;
    } catch (fault) {
      tellFault(fault);
      pressed.removeAttribute("aria-disabled");
    }
  }
  const door = (title, ...inside) => make("section.card.door", {}, make(`h${+heading[1] + 1}`, {}, title), ...inside);
  const link = (href, text) => make("div.buttons", {}, make("a.button", {href}, text));
  return make("div.welcome", {}, make(heading, {}, "Train a language model on this machine"),
    make("p", {}, "Give examples, preferences or a score for good answers: the model practises until it answers more "
      + "like that, and you can talk to it before and after."),
    make("div.doors", {},
      door("Try an example", about, make("div.buttons", {}, go)),
      door("Train on my data", make("p", {}, "A file of conversations, of better and worse answers, or of prompts. A "
        + "few questions lead to the run."), link("#/new", "New run")),
      door("Open a model to talk", make("p", {}, "A run of yours, a folder, or a model of the hub, as it is."),
        link("#/talk", "Talk"))), loop());
}

const STEPS = [["A prompt", "from your data"], ["The model answers", "in its own way"],
  ["Good or bad?", "says data, code or a model"], ["The model learns", "more like the good ones"]];

// The loop, whose arrows are drawn by the style.
const loop = () => make("ol.loop", {"aria-label": "The loop of training, again and again"},
  ...STEPS.map(([title, text]) => make("li", {}, make("strong", {}, title), ` ${text}`)));
