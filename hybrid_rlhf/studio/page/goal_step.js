// What the model is to learn from, by which method, with or without tools.

import {make} from "./dom.js";
import {frame, radios, suggestions, textInput} from "./field_frame.js";

const REST = 250; // milliseconds
const TOOLS = ["calculator", "python_expression"];
const ENVIRONMENTS = ["guess_number", "guess_number_tool", "word_game", "reasoning_gym", "openenv"];

export function goalStep(draft) {
  const more = make("div.fields.goal-more");
  const choices = draft.goals.goals.map(({id, title, help}) => ({value: id, title, help}));
  const legend = {text: "What the model learns from", isHidden: true};
  draft.on("stage", () => showMore(draft, more));
  return make("div", {},
    radios("goal", legend, choices, draft.state.goal, (id) => choose(draft, id), "goal-card"), more);
}

// Arrow keys pass over goals that nobody wants: what is chosen counts when they have come to rest.
function choose(draft, id) {
  const goal = draft.goals.goals.find((each) => each.id === id);
  draft.options = [];
  draft.update({goal: id, stage: goal.stages[0], signal: null});
  clearTimeout(draft.choosing);
  draft.choosing = setTimeout(() => draft.loadOptions(), REST);
}

function showMore(draft, more) {
  const {stages, asks} = draft.goal;
  const focused = more.contains(document.activeElement) ? document.activeElement.id : null;
  more.replaceChildren();
  if (stages.length > 1) more.append(methodField(draft));
  if (asks.includes("tools")) more.append(...toolFields(draft));
  more.hidden = !more.childNodes.length;
  if (focused) document.getElementById(focused)?.focus();
}

function methodField(draft) {
  const {stages} = draft.goal;
  const one = (stage, i) => make("option", {value: stage}, i ? stage : `${stage} (the usual one)`);
  const node = make("select", {id: "method", onchange: () => draft.takeStage(node.value)}, ...stages.map(one));
  node.value = draft.state.stage;
  return frame(draft, "stage", "Method", node, {help: draft.stageHelp}).node;
}

function toolFields(draft) {
  const box = make("input", {type: "checkbox", id: "has-tools"});
  const asked = frame(draft, "environment", "The model may use tools", box,
    {help: "Its answer may then have several turns: it calls a tool, reads what that says, and goes on."});
  const tools = textInput({id: "tools", list: "tools-known", placeholder: "builtin:calculator",
    value: draft.state.tools, set: (text) => draft.update({tools: text})});
  const place = textInput({id: "environment", list: "environments-known", placeholder: "FILE.py:CLASS",
    value: draft.state.environment, set: (text) => draft.update({environment: text})});
  const fields = [
    frame(draft, "environment.tools", "Tools it may call", tools,
      {help: "Python functions with type hints and a docstring: builtin:NAME or FILE.py:NAME, separated by commas."}),
    frame(draft, "environment.factory", "Or an environment", place,
      {help: "A class that plays the other side, such as a game; it may bring a reward of its own."})];
  const show = () => fields.forEach((field) => (field.node.hidden = !box.checked));
  box.addEventListener("change", () => {
    draft.update({hasTools: box.checked});
    show();
  });
  box.checked = draft.state.hasTools;
  show();
  return [asked.node, ...fields.map((field) => field.node), suggestions("tools-known", TOOLS.map(known)),
    suggestions("environments-known", ENVIRONMENTS.map(known))];
}

const known = (name) => ({value: `builtin:${name}`, label: "comes with hybrid_rlhf"});
