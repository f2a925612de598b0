// What a model said: the newest samples of a run with each part of their reward, and its answers to the fixed prompts.

import {make} from "./dom.js";
import {number} from "./format.js";
import {put} from "./in_place.js";
import {paced} from "./paced.js";
import {get} from "./server.js";

const SHOWN = 8; // samples of a step

// makeSamples(id) -> {node, ask(), end()}; the node stays hidden while there are none.
export function makeSamples(id) {
  const view = {id, last: "", steps: []};
  view.step = make("select", {id: "sample-step", onchange: () => view.load()});
  view.list = make("div.samples");
  view.answers = make("div");
  view.fault = make("p.fault", {role: "status"});
  view.newest = make("div", {}, make("div.line", {}, make("h2", {}, "What it says"),
    make("label", {for: "sample-step"}, "Step ", view.step)), view.list);
  view.node = make("section", {}, view.newest, view.fault, view.answers);
  view.newest.hidden = true;
  view.load = paced(() => load(view), {wait: 1000, node: view.node, fail: (fault) => put(view.fault, fault.message)});
  load(view).catch((fault) => put(view.fault, fault.message)); // whether it is seen or not: what is below would jump
  return {node: view.node, ask: view.load, end: view.load.end};
}

async function load(view) {
  const step = view.step.value;
  const found = await get("samples", {id: view.id, limit: SHOWN, ...(step && {step})});
  const text = JSON.stringify(found);
  if (text === view.last || step !== view.step.value) return;
  view.last = text;
  put(view.fault, (found.notes ?? []).join("\n"));
  fillSteps(view, found.steps);
  view.newest.hidden = !found.samples.length;
  view.list.replaceChildren(...found.samples.map((sample) => sampleNode(sample)));
  view.answers.replaceChildren(...answersNodes(found.answers ?? []));
}

function fillSteps(view, steps) {
  if (JSON.stringify(steps) === JSON.stringify(view.steps)) return;
  const before = view.step.value;
  view.steps = steps;
  const newest = new Option(steps.length ? `newest (${steps.at(-1)})` : "newest", "");
  view.step.replaceChildren(newest, ...steps.slice(0, -1).reverse().map((step) => new Option(step, step)));
  view.step.value = steps.slice(0, -1).map(String).includes(before) ? before : "";
}

// One sample: the prompt, what was said, and what there is to say of it.
export function sampleNode(sample, hasPrompt = true) {
  return make("article.card.sample", {},
    hasPrompt && sample.prompt ? make("p.prompt.said", {}, asText(sample.prompt)) : null,
    ...saidNodes(sample), notesNode(sample),
    sample.judge ? make("p.verdict.said", {}, `judge: ${asText(sample.judge)}`) : null);
}

// Text as it is; what another program wrote there instead as JSON.
const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value ?? "")).trim();

// The answer as it was; of an episode a paragraph for each turn, with who spoke.
function saidNodes({completion, turns}) {
  if (Array.isArray(turns)) return turns.map(turnNode);
  const text = asText(completion);
  return [text ? make("p.said", {}, text) : make("p.quiet", {}, "(empty)")];
}

function turnNode(turn) {
  return make("p.said", {}, turn.who ? make("span.speaker", {}, `${turn.who} `) : null, asText(turn.text));
}

// The score, its parts by source, and whether the answer came to an end.
function notesNode(sample) {
  const found = [];
  if (typeof sample.score === "number") found.push(["score", number(sample.score)]);
  else if (sample.score === null) found.push(["score", "none"]);
  for (const [name, value] of Object.entries(sample.scores ?? {})) found.push([name, number(value)]);
  const words = [sample.side, sample.ended === false ? "did not end" : null,
    sample.ended_by && sample.ended_by !== "done" ? `ended by ${String(sample.ended_by).replaceAll("_", " ")}` : null];
  if (!found.length && !words.some(Boolean)) return null;
  return make("ul.notes", {}, ...found.map(([name, value], i) =>
    make(i === 0 && name === "score" ? "li.first" : "li", {}, `${name} `, make("strong", {}, value))),
  ...words.filter(Boolean).map((word) => make("li", {}, word)));
}

// For each prompt its first and its last answer side by side; nothing where there are none.
function answersNodes(rows) {
  const prompts = new Map();
  for (const row of rows) {
    const key = JSON.stringify([row.prompt, row.side]);
    prompts.set(key, [...prompts.get(key) ?? [], row]);
  }
  const all = [...prompts.values()], isTwo = all.some((each) => each.length > 1);
  if (!all.length) return [];
  const ends = (each) => each.length > 1 ? [each[0], each.at(-1)] : each;
  const titled = (row) => ({title: isTwo ? `step ${row.step}` : "", sample: row});
  return [make("h2", {}, isTwo ? "The same prompts, before and after" : `Before: its answers at step ${rows[0].step}`),
    make(isTwo ? "div" : "div.samples", {}, ...all.map((each) => sideBySide(each[0].prompt, ends(each).map(titled))))];
}

// One prompt, and under it answers beside each other: [{title, sample or null}].
export function sideBySide(prompt, answers) {
  return make("div.asked", {}, make("p.prompt.said", {}, asText(prompt)),
    make("div.beside", {}, ...answers.map(({title, sample}) => make("div", {}, title ? make("p.speaker", {}, title) : null,
      sample ? sampleNode(sample, false) : make("p.quiet", {}, "not asked")))));
}
