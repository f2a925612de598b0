// Where the goal asks: the source of the reward. Functions, a reward model, a judge; or the teacher.

import {button, make, select} from "./dom.js";
import {codeEditor} from "./code_editor.js";
import {frame, radioPart, suggestions, textField, textInput} from "./fields.js";
import {listOf, YES_NO} from "./settings.js";
import {isPolicy, modelField} from "./start_steps.js";

const TITLES = {reward_functions: "What is a good answer?", reward_model: "Which reward model?", judge: "Who judges?",
  teacher: "Who teaches?"};
const PARTS = {reward_functions: functionPart, reward_model: modelPart, judge: judgePart, teacher: teacherPart};

// The heading of the step, or null where the goal asks nothing more.
export function rewardTitle(draft) {
  return TITLES[draft.asks.find((name) => name in TITLES)] ?? null;
}

export function rewardStep(draft) {
  return make("div", {}, ...draft.asks.filter((name) => name in PARTS).map((name) => PARTS[name](draft)));
}

// ---- functions

function functionPart(draft) {
  const help = "FILE.py:NAME, several separated by commas. It gets prompts, completions and the data's columns as "
    + "lists, and returns a number for each. It is run on this machine.";
  const columns = suggestions("data-columns", []);
  draft.follow("look", () => columns.replaceChildren(
    ...(draft.looks.data?.columns ?? []).map((value) => make("option", {value}))));
  const own = textField(draft, "reward.functions", "Or a function of your own",
    {key: "ownFunctions", placeholder: "rewards.py:my_reward", isWide: true, help});
  return make("div", {},
    make("p", {}, "A program reads each answer and gives it a number; the model learns to get more."),
    make("fieldset.radios.radio-rows", {}, make("legend.question", {}, "Ready-made functions"),
      ...draft.goals.builtin_rewards.map((row) => builtin(draft, row))),
    own.node, codeEditor(draft, (text) => {
      own.control.value = [...listOf(draft.state.ownFunctions).filter((each) => each !== text), text].join(", ");
      draft.update({ownFunctions: own.control.value});
    }), columns);
}

function builtin(draft, row) {
  const {name, help, fields = [], needed = []} = row, id = `reward-${name}`;
  const set = (option, value) => {
    const values = {...draft.state.functionSettings[name], [option]: value};
    draft.update({functionSettings: {...draft.state.functionSettings, [name]: values}});
  };
  const settings = make("div.fields", {hidden: !draft.state.functions.includes(name)},
    ...fields.map(([option, label, usual]) => settingField(draft, name, option, label, usual, set)));
  const box = make("input", {type: "checkbox", id, "aria-describedby": `${id}-about`,
    checked: draft.state.functions.includes(name), onchange: () => {
      settings.hidden = !box.checked;
      for (const [option, , usual] of fields) {
        if (box.checked && needed.includes(option) && !(option in (draft.state.functionSettings[name] ?? {}))) {
          set(option, usual);
        }
      }
      const others = draft.state.functions.filter((other) => other !== name);
      draft.update({functions: box.checked ? [...others, name] : others});
    }});
  return make("div.builtin", {}, make("div.check-line", {}, box, make("label", {for: id}, name.replaceAll("_", " "))),
    make("p.help", {id: `${id}-about`}, help), settings);
}

// A field of an option of a ready-made function; its kind is that of `usual`, its value at first.
function settingField(draft, name, option, label, usual, set) {
  const full = `reward.options.${name}.${option}`, value = draft.state.functionSettings[name]?.[option] ?? usual;
  if (option === "column") return columnField(draft, full, label, value, (text) => set(option, text || usual));
  if (typeof usual === "boolean") {
    const box = make("input", {type: "checkbox", checked: value, onchange: () => set(option, box.checked)});
    return frame(draft, full, label, box).node;
  }
  const read = (text) => typeof usual === "number" && text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text)
    : text;
  return textField(draft, full, label, {value, set: (text) => set(option, text === "" ? usual : read(text))}).node;
}

// The column with the right answer, and whether the data have it: known before a run fails for it.
function columnField(draft, option, label, value, set) {
  const note = make("p.notice", {hidden: true, role: "status"});
  const {node, control} = textField(draft, option, label, {value, list: "data-columns", after: [note],
    set: (text) => set(text.trim())});
  draft.follow("look state", () => {
    const wanted = control.value.trim() || "answer", columns = draft.looks.data?.columns ?? [];
    note.hidden = !columns.length || columns.includes(wanted);
    note.textContent = `The data have no column ${wanted}; they have ${columns.join(", ")}.`;
  });
  return node;
}

// ---- a reward model, a teacher

const SOURCES = [
  {value: "ours", title: "A run of stage reward",
    help: "Trained by hybrid_rlhf from pairs of a better and a worse answer."},
  {value: "other", title: "Somebody else's", help: "A classification model, such as one from the hub."}];

function modelPart(draft) {
  const fill = () => {
    const isOurs = draft.state.rewardKind === "ours";
    return [modelField(draft, isOurs ? "roles.reward.model_name_or_path" : "reward.models", "The reward model",
      {key: "rewardModel", fits: (row) => isOurs && row.stage === "reward"})];
  };
  return make("div", {}, make("p", {}, "A model that was trained on preferences gives each answer a number."),
    radioPart("reward-kind", "Where is it from?", SOURCES, draft.state.rewardKind,
      (rewardKind) => draft.update({rewardKind}), fill));
}

function teacherPart(draft) {
  const about = "The model answers, and at every word moves towards what the teacher would have said. "
    + "Two sizes of one family have the same tokens; a teacher with other tokens needs distill.divergence "
    + "policy_gradient, among the settings.";
  return make("div", {}, make("p", {}, about),
    modelField(draft, "roles.teacher.model_name_or_path", "The teacher", {key: "teacher", fits: isPolicy}));
}

// ---- a judge: where it runs, and its rubric: the general one, a file, or questions that are written here

const PLACES = [
  {value: "model", title: "On this machine", help: "A chat model, loaded beside the one that learns."},
  {value: "url", title: "Behind an address", help: "Any OpenAI-compatible server. It may cost money."}];
const RUBRICS = [
  {value: "general", title: "Whether the answer does what was asked, is correct and clear"},
  {value: "own", title: "My own questions"},
  {value: "file", title: "A rubric file (YAML)"}];
const KINDS = [["0-10", "0 to 10"], [YES_NO, "yes or no"]];
const EMPTY = {question: "", kind: "0-10", weight: 1};

function judgePart(draft) {
  const judge = () => draft.state.judge;
  const set = (patch) => draft.update({judge: {...judge(), ...patch}});
  // the field of an option of the judge's; name: in draft.state.judge
  const field = (option, label, name, more) => textField(draft, `reward.judge.${option}`, label,
    {value: judge()[name], set: (text) => set({[name]: text}), ...more});
  const place = () => judge().where === "url" ? addressFields(field, set)
    : [modelField(draft, "reward.judge.model", "The judge",
      {value: judge().model, set: (model) => set({model}), fits: isPolicy})];
  const rubric = () => rubricFields(field, judge, set);
  return make("div", {}, make("p", {}, "A language model reads each answer and says how good it is. "
    + "It should be better than the one that learns."),
  radioPart("judge-where", "Where does it run?", PLACES, judge().where, (where) => set({where}), place,
    make("div.fields")),
  radioPart("rubric", "What does it look at?", RUBRICS, judge().rubric, (kind) => set({rubric: kind}), rubric,
    make("div.fields")));
}

function addressFields(field, set) {
  // A key that is pasted here by mistake is not kept anywhere.
  const setKey = (text) => {
    const isName = /^([A-Za-z_][A-Za-z0-9_]*)?$/.test(text.trim());
    key.say(isName ? null : "This is the name of an environment variable, not the key.");
    set({api_key_env: isName ? text : ""});
  };
  const key = field("api_key_env", "Variable that holds the key", "api_key_env", {placeholder: "OPENAI_API_KEY",
    set: setKey, help: "The name of an environment variable that the studio was started with; never the key itself."});
  return [
    field("url", "Address", "url",
      {placeholder: "http://localhost:8000/v1", help: "Where it answers, up to /v1."}).node,
    field("api_model", "Name of the model there", "api_model",
      {placeholder: "default", help: "As the server calls it."}).node,
    key.node];
}

function rubricFields(field, judge, set) {
  if (judge().rubric === "general") return [];
  if (judge().rubric === "file") return [field("rubric", "Rubric file", "file", {placeholder: "rubric.yaml"}).node];
  return [field("rubric", "What the judge should know of the task", "instructions", {isWide: true,
    placeholder: "The response explains something in two or three sentences."}).node, questions(judge, set)];
}

function questions(judge, set) {
  const list = make("div");
  const show = (focus = null) => {
    list.replaceChildren(...judge().items.map((item, i) => itemRow(judge, set, show, item, i)));
    const last = judge().items.length - 1;
    if (focus !== null) list.children[Math.min(focus, last)]?.querySelector("input").focus();
  };
  const add = button("Add a question", () => {
    set({items: [...judge().items, EMPTY]});
    show(judge().items.length - 1);
  });
  show();
  return make("div.wide", {}, make("p.help", {}, "Ask so that yes, or 10, is good."), list,
    make("div.buttons", {}, add));
}

function itemRow(judge, set, show, item, i) {
  const change = (patch) => set({items: judge().items.map((other, j) => (j === i ? {...other, ...patch} : other))});
  const question = textInput({value: item.question, placeholder: "How correct is the explanation?",
    "aria-label": `Question ${i + 1}`, set: (text) => change({question: text})});
  const kind = select({"aria-label": `Kind of question ${i + 1}`, onchange: () => change({kind: kind.value})},
    KINDS, item.kind);
  const weight = make("input", {type: "number", min: "0", step: "any", value: item.weight,
    "aria-label": `Weight of question ${i + 1}`, oninput: () => change({weight: Number(weight.value) || 0})});
  const remove = button("Remove", () => {
    set({items: judge().items.filter((_, j) => j !== i)});
    show(i);
  }, {"aria-label": `Remove question ${i + 1}`});
  return make("div.rubric-item", {}, question, kind, make("label", {}, "weight ", weight), remove);
}
