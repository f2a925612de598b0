// A judge: where it runs, and what it looks at. The general rubric, a file, or questions that are written here.

import {make} from "./dom.js";
import {button, frame, radios, textInput} from "./field_frame.js";
import {isPolicy, modelField} from "./model_step.js";
import {YES_NO} from "./run_settings.js";

const PLACES = [
  {value: "model", title: "On this machine", help: "A chat model, loaded beside the one that learns."},
  {value: "url", title: "Behind an address", help: "Any OpenAI-compatible server. It may cost money."}];
const RUBRICS = [
  {value: "general", title: "Whether the answer does what was asked, is correct and clear"},
  {value: "own", title: "My own questions"},
  {value: "file", title: "A rubric file (YAML)"}];
const EMPTY = {question: "", kind: "0-10", weight: 1};

export function judgePart(draft) {
  const judge = () => draft.state.judge;
  const set = (patch) => draft.update({judge: {...judge(), ...patch}});
  const about = "A language model reads each answer and says how good it is. "
    + "It should be better than the one that learns.";
  return make("div", {}, make("p", {}, about),
    chosen("judge-where", "Where does it run?", PLACES, judge().where, (where) => set({where}),
      () => (judge().where === "model" ? [localJudge(draft, judge, set)] : addressFields(draft, judge, set))),
    chosen("rubric", "What does it look at?", RUBRICS, judge().rubric, (rubric) => set({rubric}),
      () => rubricFields(draft, judge, set)));
}

// Radio buttons, and below them what belongs to the one that is chosen.
function chosen(name, text, choices, first, set, fill) {
  const place = make("div.fields");
  const show = () => place.replaceChildren(...fill());
  const buttons = radios(name, {text}, choices, first, (value) => {
    set(value);
    show();
  });
  show();
  return make("div", {}, buttons, place);
}

function localJudge(draft, judge, set) {
  return modelField(draft, "reward.judge.model", "The judge",
    {value: judge().model, set: (model) => set({model}), fits: isPolicy});
}

function addressFields(draft, judge, set) {
  const one = (name, label, placeholder, help) => {
    const input = textInput({value: judge()[name], set: (text) => set({[name]: text}), placeholder});
    return frame(draft, `reward.judge.${name}`, label, input, {help}).node;
  };
  return [one("url", "Address", "http://localhost:8000/v1", "Where it answers, up to /v1."),
    one("api_model", "Name of the model there", "default", "As the server calls it."), keyField(draft, judge, set)];
}

// A key that is pasted here by mistake is not kept anywhere.
function keyField(draft, judge, set) {
  const take = (text) => {
    const isName = /^([A-Za-z_][A-Za-z0-9_]*)?$/.test(text.trim());
    field.say(isName ? null : "This is the name of an environment variable, not the key.");
    set({api_key_env: isName ? text : ""});
  };
  const input = textInput({value: judge().api_key_env, placeholder: "OPENAI_API_KEY", set: take});
  const help = "The name of an environment variable that the studio was started with; never the key itself.";
  const field = frame(draft, "reward.judge.api_key_env", "Variable that holds the key", input, {help});
  return field.node;
}

function rubricFields(draft, judge, set) {
  if (judge().rubric === "general") return [];
  if (judge().rubric === "file") {
    const input = textInput({value: judge().file, placeholder: "rubric.yaml", set: (file) => set({file})});
    return [frame(draft, "reward.judge.rubric", "Rubric file", input).node];
  }
  const about = textInput({value: judge().instructions, set: (instructions) => set({instructions}),
    placeholder: "The response explains something in two or three sentences."});
  return [frame(draft, "reward.judge.rubric", "What the judge should know of the task", about, {isWide: true}).node,
    questions(judge, set)];
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
  const change = (patch) => set({items: judge().items.map((each, j) => (j === i ? {...each, ...patch} : each))});
  const question = textInput({value: item.question, placeholder: "How correct is the explanation?",
    "aria-label": `Question ${i + 1}`, set: (text) => change({question: text})});
  const kind = make("select", {"aria-label": `Kind of question ${i + 1}`, onchange: () => change({kind: kind.value})},
    make("option", {value: "0-10"}, "0 to 10"), make("option", {value: YES_NO}, "yes or no"));
  const weight = make("input", {type: "number", min: "0", step: "any", value: item.weight,
    "aria-label": `Weight of question ${i + 1}`, oninput: () => change({weight: Number(weight.value) || 0})});
  const away = button("Remove", () => {
    set({items: judge().items.filter((_, j) => j !== i)});
    show(i);
  }, {"aria-label": `Remove question ${i + 1}`});
  kind.value = item.kind;
  return make("div.rubric-item", {}, question, kind, make("label", {}, "weight ", weight), away);
}
