// Where the goal asks: what says how good an answer is. Functions, a reward model, a judge; or the teacher.

import {make} from "./dom.js";
import {frame, radios, suggestions, textInput} from "./field_frame.js";
import {judgePart} from "./judge_part.js";
import {isPolicy, modelField} from "./model_step.js";
import {settingsOf} from "./run_settings.js";

const TITLES = {reward_functions: "What is a good answer?", reward_model: "Which reward model?", judge: "Who judges?",
  teacher: "Who teaches?"};
const PARTS = {reward_functions: functionPart, reward_model: modelPart, judge: judgePart, teacher: teacherPart};
const EXAMPLES = {
  format: '{"pattern": ".*####.*"}',
  length_penalty: '{"max_tokens": 256, "buffer": 64}',
  reasoning_gym: '{"task": "chain_sum"}',
  repetition_penalty: '{"n": 3}',
};
const PREFILLED = ["length_penalty"]; // it does nothing without, and the example is a sensible start
const BY_COLUMN = ["exact_match", "numeric_match"];
const SOURCES = [
  {value: "ours", title: "A run of stage reward",
    help: "Trained by hybrid_rlhf from pairs of a better and a worse answer."},
  {value: "other", title: "Somebody else's", help: "A classification model, such as one from the hub."}];

// The heading of the step, or null where the goal asks nothing more.
export function rewardTitle(draft) {
  return TITLES[draft.asks.find((each) => each in TITLES)] ?? null;
}

export function rewardStep(draft) {
  return make("div", {}, ...draft.asks.filter((each) => each in PARTS).map((each) => PARTS[each](draft)));
}

function functionPart(draft) {
  const own = textInput({value: draft.state.ownFunctions, placeholder: "rewards.py:my_reward",
    set: (text) => draft.update({ownFunctions: text})});
  const help = "FILE.py:NAME, several separated by commas. It gets prompts, completions and the data's columns as "
    + "lists, and returns a number for each. It is run on this machine.";
  return make("div", {},
    make("p", {}, "A program reads each answer and gives it a number; the model learns to get more."),
    make("fieldset.radios.radio-rows", {}, make("legend.question", {}, "Ready-made functions"),
      ...draft.goals.builtin_rewards.map((row) => builtin(draft, row))),
    frame(draft, "reward.functions", "Or a function of your own", own, {isWide: true, help}).node,
    columnList(draft));
}

function builtin(draft, {name, help}) {
  const id = `reward-${name}`;
  const box = make("input", {type: "checkbox", id, "aria-describedby": `${id}-about`});
  const settings = settingsField(draft, name);
  box.checked = draft.state.functions.includes(name);
  settings.hidden = !box.checked;
  box.addEventListener("change", () => {
    settings.hidden = !box.checked;
    const others = draft.state.functions.filter((each) => each !== name);
    const isEmpty = !draft.state.functionSettings[name];
    if (box.checked && isEmpty && PREFILLED.includes(name)) prefill(draft, name, settings);
    if (!box.checked) draft.unread.delete(`reward.options.${name}`);
    draft.update({functions: box.checked ? [...others, name] : others});
  });
  return make("div.builtin", {}, make("div.check-line", {}, box, make("label", {for: id}, name.replaceAll("_", " "))),
    make("p.help", {id: `${id}-about`}, help), settings);
}

function prefill(draft, name, settings) {
  settings.querySelector("input").value = EXAMPLES[name];
  draft.update({functionSettings: {...draft.state.functionSettings, [name]: EXAMPLES[name]}});
}

function settingsField(draft, name) {
  const option = `reward.options.${name}`;
  const value = draft.state.functionSettings[name] ?? "";
  const write = (text) => draft.update({functionSettings: {...draft.state.functionSettings, [name]: text}});
  if (BY_COLUMN.includes(name)) {
    const input = textInput({value: settingsOf(value)?.column ?? "", list: "data-columns", placeholder: "answer",
      set: (text) => write(text.trim() ? JSON.stringify({column: text.trim()}) : "")});
    return frame(draft, option, "Column with the right answer", input, {after: [columnNote(draft, input)]}).node;
  }
  const set = (text) => {
    if (settingsOf(text)) draft.unread.delete(option);
    else draft.unread.set(option, 'Not complete JSON yet, such as {"name": 1}');
    field.say(draft.unread.get(option));
    write(text);
  };
  const field = frame(draft, option, "Its settings, as JSON",
    textInput({value, set, placeholder: EXAMPLES[name] ?? "{}"}));
  return field.node;
}

// Whether the data have the column; known before a run fails for it.
function columnNote(draft, input) {
  const note = make("p.notice", {hidden: true, role: "status"});
  const show = () => {
    const wanted = input.value.trim() || input.placeholder;
    const there = draft.looks.data?.columns ?? [];
    note.hidden = !there.length || there.includes(wanted);
    note.textContent = `The data have no column ${wanted}; they have ${there.join(", ")}.`;
  };
  draft.onStage(["look", "state"], show);
  show();
  return note;
}

function columnList(draft) {
  const list = suggestions("data-columns", []);
  const show = () => list.replaceChildren(...(draft.looks.data?.columns ?? []).map((value) => make("option", {value})));
  draft.onStage(["look"], show);
  show();
  return list;
}

function modelPart(draft) {
  const place = make("div");
  const show = () => {
    const isOurs = draft.state.rewardKind === "ours";
    const option = isOurs ? "roles.reward.model_name_or_path" : "reward.models";
    place.replaceChildren(modelField(draft, option, "The reward model", {value: draft.state.rewardModel,
      set: (text) => draft.update({rewardModel: text}), fits: (row) => isOurs && row.stage === "reward"}));
  };
  const kinds = radios("reward-kind", {text: "Where is it from?"}, SOURCES, draft.state.rewardKind, (kind) => {
    draft.update({rewardKind: kind});
    show();
  });
  show();
  return make("div", {}, make("p", {}, "A model that was trained on preferences gives each answer a number."),
    kinds, place);
}

function teacherPart(draft) {
  const about = "The model answers, and at every word moves towards what the teacher would have said. "
    + "Both need the same tokenizer: two sizes of one family, say.";
  return make("div", {}, make("p", {}, about),
    modelField(draft, "roles.teacher.model_name_or_path", "The teacher", {value: draft.state.teacher,
      set: (text) => draft.update({teacher: text}), fits: isPolicy}));
}
