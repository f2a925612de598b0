// Step 1: what the model is to learn from, by which method, with or without tools.

import {make} from "./dom.js";
import {frame, radios, suggestions, textInput} from "./field_frame.js";

const REST = 250; // milliseconds

export function goalStep(draft) {
  const more = make("div.fields.goal-more");
  const choices = draft.goals.goals.map(({id, title, help}) => ({value: id, title, help}));
  const node = make("div", {},
    radios("goal", {text: "What the model learns from", isHidden: true}, choices, draft.state.goal, (id) => choose(draft, id), "goal-card"),
    more);
  draft.on("stage", () => showMore(draft, more));
  return node;
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
  const {goal} = draft;
  const hadFocus = more.contains(document.activeElement) ? document.activeElement.id : null;
  more.replaceChildren(...(goal.stages.length > 1 ? [methodField(draft)] : []), ...(goal.asks.includes("tools") ? toolFields(draft) : []));
  more.hidden = !more.childNodes.length;
  if (hadFocus) (more.querySelector(`#${hadFocus}`) ?? more.querySelector("select, input"))?.focus();
}

function methodField(draft) {
  const {stages} = draft.goal;
  const node = make("select", {id: "method", onchange: () => draft.takeStage(node.value)},
    ...stages.map((stage, i) => make("option", {value: stage}, i ? stage : `${stage} (the usual one)`)));
  node.value = draft.state.stage;
  return frame(draft, "stage", "Method", node, {help: draft.stageHelp}).node;
}

function toolFields(draft) {
  const box = make("input", {type: "checkbox", id: "has-tools", onchange: () => {
    draft.update({hasTools: box.checked});
    show();
  }});
  box.checked = draft.state.hasTools;
  const tools = frame(draft, "environment.tools", "Tools it may call", textInput({id: "tools", list: "tools-known",
    value: draft.state.tools, set: (tools) => draft.update({tools}), placeholder: "builtin:calculator"}),
    {help: "Python functions with type hints and a docstring: builtin:NAME or FILE.py:NAME, separated by commas."});
  const place = frame(draft, "environment.factory", "Or an environment", textInput({id: "environment", list: "environments-known",
    value: draft.state.environment, set: (environment) => draft.update({environment}), placeholder: "FILE.py:CLASS"}),
    {help: "A class that plays the other side, such as a game; it may bring a reward of its own."});
  const show = () => [tools, place].forEach((field) => (field.node.hidden = !box.checked));
  show();
  const asked = frame(draft, "environment", "The model may use tools", box,
    {help: "Its answer may then have several turns: it calls a tool, reads what that says, and goes on."});
  return [asked.node, tools.node, place.node, suggestions("tools-known", known("calculator", "python_expression")),
    suggestions("environments-known", known("guess_number", "guess_number_tool", "word_game", "reasoning_gym", "openenv"))];
}

const known = (...names) => names.map((name) => ({value: `builtin:${name}`, label: "comes with hybrid_rlhf"}));
