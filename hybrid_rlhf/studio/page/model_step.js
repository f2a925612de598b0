// Which model: a run of this studio, a folder or a hub id. Step 2, and wherever else a model is named.

import {make} from "./dom.js";
import {frame, radios, suggestions, textInput} from "./field_frame.js";

const GOOD_FIRST = [["HuggingFaceTB/SmolLM2-135M-Instruct", "very small and quick"], ["Qwen/Qwen2.5-0.5B-Instruct", "small"]];
const PRESETS = [["tiny", "tiny"], ["demo", "demo"], ["small", "small"]];

export function modelStep(draft) {
  const place = make("div");
  const canBeNew = draft.options.some((option) => option.name === "model.preset");
  const show = () => place.replaceChildren(draft.state.isNew && canBeNew ? presetField(draft) : startField(draft));
  if (draft.state.isNew && !canBeNew) draft.update({isNew: false});
  const kinds = [{value: "old", title: "A model that exists"},
    {value: "new", title: "A tiny new one", help: "Random at first, trained in minutes even without a card: for trying things out."}];
  const choice = radios("model-kind", {text: "Start from"}, kinds, draft.state.isNew ? "new" : "old", (kind) => {
    draft.update({isNew: kind === "new"});
    show();
  });
  show();
  return canBeNew ? make("div", {}, choice, place) : place;
}

function startField(draft) {
  return modelField(draft, "model.model_name_or_path", "The model to start from", {
    value: draft.state.model, set: (model) => draft.update({model}), fits: (row) => row.stage !== "reward", proposes: GOOD_FIRST});
}

function presetField(draft) {
  const node = make("select", {id: "preset", onchange: () => draft.update({preset: node.value})},
    ...PRESETS.map(([value, title]) => make("option", {value}, title)));
  node.value = draft.state.preset;
  return frame(draft, "model.preset", "Its size", node, {help: "A tokenizer is made from your data. Nothing is downloaded."}).node;
}

// A text field for a model. fits(row): which runs are suggested; proposes: [[hub id, why]].
export function modelField(draft, option, label, {value, set, fits, proposes = [], help = ""}) {
  const rows = draft.runs.rows.filter((row) => row.has_model && fits(row));
  const what = make("p.help", {role: "status"});
  const id = `models-${option.replaceAll(".", "-")}`;
  const input = textInput({value, list: id, placeholder: "a run, a folder or a hub id", set: (text) => {
    set(text);
    tellWhat(draft, text, what);
  }});
  const use = (text) => {
    input.value = text;
    set(text);
    tellWhat(draft, text, what);
    input.focus();
  };
  const list = suggestions(id, [...rows.map((row) => ({value: row.id, label: `run of this studio: ${row.stage}, ${row.status}`})),
    ...proposes.map(([value, why]) => ({value, label: why}))]);
  const buttons = rows.slice(0, 3).map((row) => [row.id, `your run, ${row.stage}`]).concat(proposes);
  const offers = make("p.offers", {}, "Or take ", ...buttons.flatMap(([name, why], i) => [i ? ", " : "",
    make("button.quiet-button", {type: "button", onclick: () => use(name)}, name), ` (${why})`]));
  tellWhat(draft, value, what);
  return frame(draft, option, label, input, {help, isWide: true, after: [what, list, buttons.length ? offers : null]}).node;
}

function tellWhat(draft, text, what) {
  const named = text.trim();
  const row = draft.runs.rows.find((each) => each.id === named);
  what.textContent = row ? `A run of this studio: ${row.stage}, ${row.status}.${row.has_model ? "" : " It has left no model yet."}`
    : !named ? "" : /^[./~]/.test(named) || named.split("/").length > 2 ? "A folder of this machine."
      : "A hub id: it is fetched from huggingface.co where it is not here yet.";
}
