// Samples: the newest ones of a run with each part of their reward, and its answers to the fixed prompts.

import {fold, make, onChange, put} from "./dom.js";
import {count, isNarrow, number} from "./format.js";
import {get, paced} from "./server.js";

const SHOWN = 8; // samples of a step
const FIRST = isNarrow() ? 2 : 3; // prompts before and after that are not folded

// makeSamples(id) -> {answers, node, ask(), end()}: nodes of the answers to the fixed prompts and of the newest
// samples, each hidden while there are none.
export function makeSamples(id) {
  const step = make("select", {id: "sample-step", onchange: () => ask()});
  const list = make("div.samples"), answers = make("div"), fault = make("p.fault", {role: "status"});
  const node = fold("Newest samples", make("div.line", {}, make("label", {for: "sample-step"}, "Step ", step)), list);
  node.hidden = true;
  node.open = !isNarrow();
  const first = make("section", {}, fault, answers);
  const fail = (error) => put(fault, error.message);
  const fillSteps = onChange((steps) => {
    const before = step.value, older = steps.slice(0, -1);
    const first = new Option(steps.length ? `newest (${steps.at(-1)})` : "newest", "");
    step.replaceChildren(first, ...older.toReversed().map((value) => new Option(value, value)));
    step.value = older.map(String).includes(before) ? before : "";
  });
  const update = onChange((reply) => {
    fillSteps(reply.steps);
    node.hidden = !reply.samples.length;
    list.replaceChildren(...reply.samples.map((sample) => sampleNode(sample)));
    answers.replaceChildren(...answersNodes(reply.answers ?? []));
  });
  const load = async () => {
    const chosen = step.value;
    const reply = await get("samples", {id, limit: SHOWN, ...(chosen && {step: chosen})});
    put(fault, "");
    if (chosen === step.value) update(reply);
  };
  const ask = paced(load, {wait: 1000, fail});
  load().catch(fail);
  return {answers: first, node, ask, end: ask.end};
}

// One sample: the prompt, the response, and its notes.
function sampleNode(sample, hasPrompt = true) {
  return make("article.card.sample", {},
    hasPrompt ? picturesNode(sample.images) : null, hasPrompt && sample.prompt ? promptNode(sample.prompt) : null,
    ...responseNodes(sample), notesNode(sample),
    sample.judge ? make("p.verdict.said", {}, `judge: ${asText(sample.judge)}`) : null);
}

// ---- prompts, without the marks of a chat template unless these are asked for

// As report/terminal.py has them: <|im_end|>, </s>, <start_of_turn>, [/INST]; and the speaker that follows one.
const MARK = /<\|[^|<>]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<\/?s>|<(?:start|end)_of_turn>|\[\/?INST\]/;
const SPEAKER = /^\s*(user|human|assistant|model|system|tool) *(?::|\n|$)/i;
let showsMarks = false;

// The text of a prompt's turns; with their speakers where there are several.
export function withoutMarks(text) {
  if (!MARK.test(text)) return text;
  const turns = text.split(MARK).map((part) => [SPEAKER.exec(part)?.[1], part.replace(SPEAKER, "").trim()])
    .filter(([who, said]) => said && who !== "system"); // a template's usual one stands in every prompt
  return turns.length < 2 ? turns[0]?.[1] ?? text : turns.map(([who, said]) => (who ? `${who}: ${said}` : said)).join("\n");
}

// Small pictures of a prompt's images, [{name, url}]; where the url is null a name alone.
export function picturesNode(images) {
  if (!Array.isArray(images) || !images.length) return null;
  return make("div.pictures", {}, ...images.map(({name, url}) =>
    (url ? make("img", {src: url, alt: name, title: name}) : make("span.quiet", {}, name))));
}

function promptNode(prompt) {
  const text = asText(prompt), node = make("p.prompt.said");
  node.show = () => put(node, showsMarks ? text : withoutMarks(text));
  node.show();
  return node;
}

// A box that shows the marks of chat templates in all prompts of the page.
function marksBox() {
  const box = make("input", {type: "checkbox", id: "shows-marks", checked: showsMarks, onchange: () => {
    showsMarks = box.checked;
    document.querySelectorAll("p.prompt").forEach((node) => node.show());
  }});
  return make("label.check", {}, box, " Show the marks of the chat template in the prompts");
}

// Text as it is; other values, which another program wrote, as JSON.
const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value ?? "")).trim();

// The response; of an episode a paragraph for each turn, with its speaker.
function responseNodes({completion, turns}) {
  if (Array.isArray(turns)) {
    return turns.map(({who, text}) =>
      make("p.said", {}, who ? make("span.speaker", {}, `${who} `) : null, asText(text)));
  }
  const text = asText(completion);
  return [text ? make("p.said", {}, text) : make("p.quiet", {}, "(empty)")];
}

// The score, its parts by source, and whether the response came to an end.
function notesNode({score, scores, side, ended, ended_by: reason}) {
  const parts = Object.entries(scores ?? {}).map(([name, value]) => [name, number(value)]);
  if (score === null || typeof score === "number") parts.unshift(["score", score === null ? "none" : number(score)]);
  const words = [side, ended === false ? "did not end" : null,
    reason && reason !== "done" ? `ended by ${String(reason).replaceAll("_", " ")}` : null].filter(Boolean);
  if (!parts.length && !words.length) return null;
  const items = parts.map(([name, value], i) =>
    make(i === 0 && name === "score" ? "li.first" : "li", {}, `${name} `, make("strong", {}, value)));
  return make("ul.notes", {}, ...items, ...words.map((word) => make("li", {}, word)));
}

// For each prompt its first and its last answer side by side; nothing where there are none.
function answersNodes(rows) {
  if (!rows.length) return [];
  const prompts = [...Map.groupBy(rows, ({prompt, side, images}) => JSON.stringify([prompt, side, images])).values()];
  const isTwo = prompts.some((answers) => answers.length > 1);
  const titled = (row, i) => ({title: isTwo ? `${i ? "after" : "before"}, step ${row.step}` : "", sample: row});
  const ends = (answers) => (answers.length > 1 ? [answers[0], answers.at(-1)] : answers).map(titled);
  const nodes = prompts.map((answers) => sideBySide(answers[0].prompt, ends(answers)));
  const hasMarks = rows.some(({prompt}) => MARK.test(asText(prompt)));
  return [make("h2", {}, isTwo ? "The same prompts, before and after" : `Before: its answers at step ${rows[0].step}`),
    make(isTwo ? "div" : "div.samples", {}, ...nodes.slice(0, FIRST)),
    nodes.length > FIRST ? fold(count(nodes.length - FIRST, "more prompt"),
      make(isTwo ? "div" : "div.samples", {}, ...nodes.slice(FIRST))) : "", hasMarks ? marksBox() : ""];
}

// One prompt, and under it answers beside each other: [{title, sample or null}].
export function sideBySide(prompt, answers) {
  return make("div.asked", {}, picturesNode(answers.find(({sample}) => sample)?.sample.images), promptNode(prompt),
    make("div.beside", {}, ...answers.map(({title, sample}) => make("div", {},
      title ? make("p.speaker", {}, title) : null,
      sample ? sampleNode(sample, false) : make("p.quiet", {}, "not asked")))));
}
