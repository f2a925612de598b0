// Step 4, where the goal asks: what says how good an answer is. Functions, a reward model, a judge; or the teacher.

import {make} from "./dom.js";
import {frame, radios, suggestions, textInput} from "./field_frame.js";
import {modelField} from "./model_step.js";
import {rubricPart} from "./rubric.js";
import {settingsOf} from "./run_settings.js";

const TITLES = {reward_functions: "What is a good answer?", reward_model: "Which reward model?", judge: "Who judges?", teacher: "Who teaches?"};
const EXAMPLES = {length_penalty: '{"max_tokens": 256, "buffer": 64}', repetition_penalty: '{"n": 3}', format: '{"pattern": ".*####.*"}',
  reasoning_gym: '{"task": "chain_sum"}'};
const PREFILLED = ["length_penalty"]; // it does nothing without, and the example is a sensible start
const BY_COLUMN = ["exact_match", "numeric_match"];

// The heading of the step, or null where the goal asks nothing more.
export function rewardTitle(draft) {
  const asked = Object.keys(TITLES).find((each) => draft.asks.includes(each));
  return asked ? TITLES[asked] : null;
}

export function rewardStep(draft) {
  const parts = [];
  if (draft.asks.includes("reward_functions")) parts.push(functionPart(draft));
  if (draft.asks.includes("reward_model")) parts.push(modelPart(draft));
  if (draft.asks.includes("judge")) parts.push(judgePart(draft));
  if (draft.asks.includes("teacher")) parts.push(teacherPart(draft));
  return make("div", {}, ...parts);
}

function functionPart(draft) {
  const boxes = draft.goals.builtin_rewards.map((row) => builtin(draft, row));
  const own = frame(draft, "reward.functions", "Or a function of your own", textInput({value: draft.state.ownFunctions,
    set: (ownFunctions) => draft.update({ownFunctions}), placeholder: "rewards.py:my_reward"}),
    {isWide: true, help: "FILE.py:NAME, several separated by commas. It gets prompts, completions and the data's columns as lists, and "
      + "returns a number for each. It is run on this machine."});
  return make("div", {}, make("p", {}, "A program reads each answer and gives it a number; the model learns to get more."),
    make("fieldset.radios.radio-rows", {}, make("legend.question", {}, "Ready-made functions"), ...boxes),
    own.node, columnList(draft));
}

function builtin(draft, {name, help}) {
  const id = `reward-${name}`;
  const box = make("input", {type: "checkbox", id, "aria-describedby": `${id}-about`, onchange: () => {
    const others = draft.state.functions.filter((each) => each !== name);
    if (box.checked && PREFILLED.includes(name) && !draft.state.functionSettings[name]) {
      settings.querySelector("input").value = EXAMPLES[name];
      draft.state.functionSettings = {...draft.state.functionSettings, [name]: EXAMPLES[name]};
    }
    if (!box.checked) draft.unread.delete(`reward.options.${name}`);
    draft.update({functions: box.checked ? [...others, name] : others});
    settings.hidden = !box.checked;
  }});
  box.checked = draft.state.functions.includes(name);
  const settings = settingsField(draft, name);
  settings.hidden = !box.checked;
  return make("div.builtin", {}, make("div.check-line", {}, box, make("label", {for: id}, name.replaceAll("_", " "))),
    make("p.help", {id: `${id}-about`}, help), settings);
}

function settingsField(draft, name) {
  const write = (text) => draft.update({functionSettings: {...draft.state.functionSettings, [name]: text}});
  const given = draft.state.functionSettings[name] ?? "";
  const option = `reward.options.${name}`;
  if (BY_COLUMN.includes(name)) {
    return frame(draft, option, "Column with the right answer", textInput({value: settingsOf(given)?.column ?? "", list: "data-columns",
      placeholder: "answer", set: (text) => write(text.trim() ? JSON.stringify({column: text.trim()}) : "")})).node;
  }
  const field = frame(draft, option, "Its settings, as JSON", textInput({value: given, placeholder: EXAMPLES[name] ?? "{}", set: (text) => {
    const isRead = settingsOf(text) !== null;
    if (isRead) draft.unread.delete(option);
    else draft.unread.set(option, 'Not complete JSON yet, such as {"name": 1}');
    field.say(draft.unread.get(option));
    write(text);
  }}));
  return field.node;
}

function columnList(draft) {
  const list = make("datalist", {id: "data-columns"});
  const show = () => list.replaceChildren(...(draft.looks.data?.columns ?? []).map((value) => make("option", {value})));
  draft.onStage(["look"], show);
  show();
  return list;
}

function modelPart(draft) {
  const option = () => (draft.state.rewardKind === "ours" ? "roles.reward.model_name_or_path" : "reward.models");
  const place = make("div");
  const show = () => place.replaceChildren(modelField(draft, option(), "The reward model", {value: draft.state.rewardModel,
    set: (rewardModel) => draft.update({rewardModel}), fits: (row) => row.stage === "reward"}));
  const kinds = radios("reward-kind", {text: "Where is it from?"}, [
    {value: "ours", title: "A run of stage reward", help: "Trained by hybrid_rlhf from pairs of a better and a worse answer."},
    {value: "other", title: "Somebody else's", help: "A classification model, such as one from the hub."}],
  draft.state.rewardKind, (rewardKind) => {
    draft.update({rewardKind});
    show();
  });
  show();
  return make("div", {}, make("p", {}, "A model that was trained on preferences gives each answer a number."), kinds, place);
}

function teacherPart(draft) {
  return make("div", {}, make("p", {}, "The model answers, and at every word moves towards what the teacher would have said. "
    + "Both need the same tokenizer: two sizes of one family, say."),
  modelField(draft, "roles.teacher.model_name_or_path", "The teacher", {value: draft.state.teacher,
    set: (teacher) => draft.update({teacher}), fits: (row) => row.stage !== "reward"}));
}

function judgePart(draft) {
  const place = make("div.fields");
  const judge = () => draft.state.judge;
  const set = (patch) => draft.update({judge: {...judge(), ...patch}});
  const show = () => place.replaceChildren(...(judge().where === "model" ? [localJudge(draft, judge, set)] : addressFields(draft, judge, set)));
  const kinds = radios("judge-where", {text: "Where does it run?"}, [
    {value: "model", title: "On this machine", help: "A chat model, loaded beside the one that learns."},
    {value: "url", title: "Behind an address", help: "Any OpenAI-compatible server. It may cost money."}], judge().where, (where) => {
    set({where});
    show();
  });
  show();
  return make("div", {}, make("p", {}, "A language model reads each answer and says how good it is. It should be better than the one that learns."),
    kinds, place, rubricPart(draft, judge, set));
}

function localJudge(draft, judge, set) {
  return modelField(draft, "reward.judge.model", "The judge", {value: judge().model, set: (model) => set({model}),
    fits: (row) => row.stage !== "reward"});
}

function addressFields(draft, judge, set) {
  const one = (name, label, placeholder, help) => frame(draft, `reward.judge.${name}`, label,
    textInput({value: judge()[name], set: (text) => set({[name]: text}), placeholder}), {help}).node;
  const key = frame(draft, "reward.judge.api_key_env", "Variable that holds the key", textInput({value: judge().api_key_env,
    placeholder: "OPENAI_API_KEY", set: (text) => {
      const isName = /^[A-Za-z_][A-Za-z0-9_]*$/.test(text.trim()) || !text.trim();
      key.say(isName ? null : "This is the name of an environment variable, not the key.");
      set({api_key_env: isName ? text : ""}); // a key that was pasted here is not kept anywhere
    }}), {help: "The name of an environment variable that the studio was started with; never the key itself."});
  return [one("url", "Address", "http://localhost:8000/v1", "Where it answers, up to /v1."),
    one("api_model", "Name of the model there", "default", "As the server calls it."), key.node];
}
