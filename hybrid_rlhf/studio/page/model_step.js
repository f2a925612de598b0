// Which model: a run of this studio, a folder or a hub id. A step of its own, and wherever else a model is named.

import {make} from "./dom.js";
import {frame, inline, radios, suggestions, textInput} from "./field_frame.js";

const GOOD_FIRST = [["HuggingFaceTB/SmolLM2-135M-Instruct", "very small and quick"],
  ["Qwen/Qwen2.5-0.5B-Instruct", "small"]];
const PRESETS = ["tiny", "demo", "small"];
const KINDS = [
  {value: "old", title: "A model that exists"},
  {value: "new", title: "A tiny new one",
    help: "Random at first, trained in minutes even without a card: for trying things out."}];

export function modelStep(draft) {
  const place = make("div");
  const canBeNew = draft.options.some((option) => option.name === "model.preset");
  if (draft.state.isNew && !canBeNew) draft.update({isNew: false});
  const show = () => place.replaceChildren(draft.state.isNew ? presetField(draft) : startField(draft));
  show();
  if (!canBeNew) return place;
  const chosen = draft.state.isNew ? "new" : "old";
  const choice = radios("model-kind", {text: "Start from"}, KINDS, chosen, (kind) => {
    draft.update({isNew: kind === "new"});
    show();
  });
  return make("div", {}, choice, place);
}

function startField(draft) {
  return modelField(draft, "model.model_name_or_path", "The model to start from", {
    value: draft.state.model, set: (model) => draft.update({model}), fits: isPolicy, proposes: GOOD_FIRST});
}

// Whether a run leaves a model that answers, and none that scores.
export const isPolicy = (row) => row.stage !== "reward";

function presetField(draft) {
  const choices = PRESETS.map((value) => make("option", {value}, value));
  const node = make("select", {id: "preset", onchange: () => draft.update({preset: node.value})}, ...choices);
  node.value = draft.state.preset;
  const help = "A tokenizer is made from your data. Nothing is downloaded.";
  return frame(draft, "model.preset", "Its size", node, {help}).node;
}

// A text field for a model. fits(row): which runs are suggested; proposes: [[hub id, why]].
export function modelField(draft, option, label, {value, set, fits, proposes = []}) {
  const rows = draft.runs.rows.filter((row) => row.has_model && fits(row));
  const what = make("p.help", {role: "status"});
  const id = `models-${option.replaceAll(".", "-")}`;
  const take = (text) => {
    set(text);
    what.textContent = whatItIs(draft, text.trim());
  };
  const input = textInput({value, list: id, placeholder: "a run, a folder or a hub id", set: take});
  const use = (text) => {
    input.value = text;
    take(text);
    input.focus();
  };
  const runs = rows.map((row) => ({value: row.id, label: `run of this studio: ${row.stage}, ${row.status}`}));
  const list = suggestions(id, [...runs, ...proposes.map(([name, why]) => ({value: name, label: why}))]);
  const offers = [...rows.slice(0, 3).map((row) => [row.id, `your run, ${row.stage}`]), ...proposes];
  what.textContent = whatItIs(draft, value.trim());
  return frame(draft, option, label, input, {isWide: true, after: [what, list, offerLine(offers, use)]}).node;
}

function offerLine(offers, use) {
  if (!offers.length) return null;
  const one = ([name, why], i) => [i ? ", " : "", inline(name, () => use(name)), ` (${why})`];
  return make("p.offers", {}, "Or take ", ...offers.flatMap(one));
}

function whatItIs(draft, name) {
  if (!name) return "";
  const row = draft.runs.rows.find((each) => each.id === name);
  if (row && !row.has_model) return `A run of this studio: ${row.stage}, ${row.status}. It has left no model yet.`;
  if (row) return `A run of this studio: ${row.stage}, ${row.status}.`;
  if (/^[./~]/.test(name) || name.split("/").length > 2) return "A folder of this machine.";
  return "A hub id: it is fetched from huggingface.co where it is not here yet.";
}
