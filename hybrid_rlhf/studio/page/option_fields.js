// One option of the launcher as a field: what kind of input it takes, whether it differs from its default, and a way back.

import {make} from "./dom.js";
import {frame, goTo} from "./field_frame.js";
import {listOf, same} from "./run_settings.js";

const TITLES = {"model.lora.r": "Rank of the adapters (LoRA)", "model.gradient_checkpointing": "Compute activations again, to save memory",
  "roles.actor.learning_rate": "Learning rate", "roles.critic.learning_rate": "Learning rate of the critic",
  "train.eval_steps": "Steps between evaluations", "data.split": "Shares of the three stages", "data.packing": "Several examples to a row",
  "model.lora.alpha": "Scale of the adapters (LoRA)",
  "train.per_device_train_batch_size": "Rows of a step", "ppo.kl_coef": "Price of drifting from the start (KL)",
  "ppo.sampling.num_samples": "Answers to each prompt", "ppo.sampling.max_new_tokens": "Longest answer, tokens",
  "distill.sampling.max_new_tokens": "Longest answer, tokens", "dpo.beta": "Beta", "data.max_length": "Longest row, tokens",
  "data.max_prompt_length": "Longest prompt, tokens", "train.num_train_epochs": "Passes over the data",
  "train.max_steps": "Steps", "model.load_in_4bit": "Base in 4 bits"};

const STAGES = {sft: "stage 1", reward: "stage 2", ppo: "stage 3"};

// A name for people; the option's own stands beside it.
export function titleOf(option) {
  const [, stage, name] = /^stages\.(\w+)\.(.*)$/.exec(option.name) ?? [null, null, option.name];
  const words = name.split(".").at(-1).replaceAll("_", " ");
  const title = TITLES[stage ? `train.${name}` : name] ?? words[0].toUpperCase() + words.slice(1);
  return stage ? `${title}, ${STAGES[stage] ?? stage}` : title;
}

// A value as a person writes it.
export function written(value) {
  if (value === null || value === undefined) return "null";
  if (typeof value === "number" && value !== 0 && Math.abs(value) < 1e-3) return value.toExponential();
  if (Array.isArray(value)) return value.length ? listText(value) : "nothing";
  return typeof value === "object" ? JSON.stringify(value) : value === "" ? "nothing" : String(value);
}

function listText(list) {
  const isPlain = list.every((each) => typeof each !== "object" && each !== "" && !/[,[\]{}]|^\s|\s$/.test(String(each)));
  return isPlain ? list.join(", ") : JSON.stringify(list);
}

// The input of a kind: {node, read() -> value (throws an Error with what is wrong), write(value)}.
function inputOf(option) {
  if (option.kind === "bool" && !option.null) return checkbox();
  if (option.kind === "bool") return select(["true", "false"], (text) => text === "true", option);
  if (option.kind === "choice") return select(option.choices.map(String), (text) => option.choices.find((c) => String(c) === text), option);
  return typed(option);
}

function checkbox() {
  const node = make("input", {type: "checkbox"});
  return {node, read: () => node.checked, write: (value) => (node.checked = value === true)};
}

function select(choices, read, option) {
  const all = option.null ? ["", ...choices] : choices;
  const node = make("select", {}, ...all.map((each) => make("option", {value: each}, each || "null (goes by the rest)")));
  return {node, read: () => (node.value === "" && option.null ? null : read(node.value)),
    write: (value) => {
      const text = value === null || value === undefined ? "" : String(value);
      if (![...node.options].some((each) => each.value === text)) node.append(make("option", {value: text}, text));
      node.value = text;
    }};
}

function typed(option) {
  const isLong = option.kind === "json";
  const mode = {int: "numeric", float: "decimal"}[option.kind];
  const hint = option.null ? (option.by_table ? "by the method" : "null") : option.kind === "list" ? "separated by commas" : null;
  const node = make(isLong ? "textarea" : "input",
    {...(isLong ? {rows: 2} : {type: "text"}), inputmode: mode, autocomplete: "off", spellcheck: "false", placeholder: hint});
  return {node, read: () => parsed(node.value.trim(), option), write: (value) => (node.value = shown(value, option))};
}

function shown(value, option) {
  if (value === null || value === undefined) return "";
  if (option.kind === "json") return typeof value === "string" ? value : JSON.stringify(value);
  if (Array.isArray(value)) return value.length ? listText(value) : "";
  return typeof value === "number" ? written(value) : String(value);
}

// What is typed as a value; what is no number is sent as it is, for the launcher's own refusal.
export function parsed(text, option) {
  if (text === "" && option.null) return null;
  if (option.kind === "int" || option.kind === "float") return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
  if (option.kind === "list") {
    if (/^[[{]/.test(text)) return json(text);
    const items = listOf(text);
    return items.length && items.every((each) => Number.isFinite(Number(each))) ? items.map(Number) : items;
  }
  if (option.kind !== "json") return text;
  if (text === "") return option.default && typeof option.default === "object" ? (Array.isArray(option.default) ? [] : {}) : text;
  if (/^[[{"]/.test(text)) return json(text);
  return text === "true" ? true : text === "false" ? false : Number.isFinite(Number(text)) ? Number(text) : text;
}

function json(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error('This is not complete JSON, such as {"name": "text", "list": [1, 2]}');
  }
}

function helpOf(option) {
  return option.by_table && option.default === null ? `${option.help} Left empty: ${option.by_table}.` : option.help;
}

// The field of an option. It follows the draft until the stage changes.
export function optionField(draft, option) {
  const input = inputOf(option);
  const mark = make("p.mark", {hidden: true});
  const elsewhere = make("p.mark", {hidden: true});
  const label = make("span", {}, titleOf(option), " ", make("code", {}, option.name));
  const field = frame(draft, option.name, label, input.node,
    {help: helpOf(option), after: [mark, elsewhere], isWide: option.kind === "json", isListed: true});
  const isTyped = input.node.localName !== "select" && input.node.type !== "checkbox";
  input.node.addEventListener(isTyped ? "input" : "change", () => take(draft, option, input, field));
  const follow = () => {
    const isGuided = option.name in draft.guided();
    input.node.disabled = isGuided;
    if (document.activeElement !== input.node && !draft.unread.has(option.name)) input.write(draft.value(option));
    showMark(draft, option, mark, isGuided, () => {
      draft.dropOption(option.name);
      input.write(draft.base(option));
      field.say(null);
      input.node.focus();
    });
    showElsewhere(draft, option, elsewhere, isGuided);
  };
  draft.onStage(["state", "answer"], follow);
  follow();
  return field.node;
}

function take(draft, option, input, field) {
  try {
    const value = input.read();
    draft.unread.delete(option.name);
    field.say(null);
    draft.setOption(option, value);
  } catch (fault) {
    draft.unread.set(option.name, fault.message);
    field.say(fault.message);
    draft.emit("state");
  }
}

function showMark(draft, option, mark, isGuided, back) {
  const isOwn = draft.isOwn(option.name) && !isGuided;
  const isOther = !isGuided && !same(draft.value(option), option.default);
  mark.hidden = !isOwn && !isOther;
  const state = isOwn ? "own" : isOther ? "other" : "";
  const base = baseText(draft.base(option), option);
  if (mark.dataset.state === state + base) return;
  mark.dataset.state = state + base;
  if (isOwn) mark.replaceChildren("Changed by you. ", make("button.quiet-button", {type: "button", onclick: back}, `Back to ${base}`,
    make("span.hidden", {}, `: ${option.name}`)));
  else if (isOther) mark.replaceChildren(`Set by your choices above; the default is ${baseText(option.default, option)}.`);
}

const baseText = (value, option) => (value === null && option.by_table ? "the method's own" : written(value));

function showElsewhere(draft, option, elsewhere, isGuided) {
  elsewhere.hidden = !isGuided;
  if (!isGuided || elsewhere.childNodes.length) return;
  elsewhere.append("Set by a step above. ", make("button.quiet-button", {type: "button", onclick: () => goTo(draft, option.name)},
    "Change it there", make("span.hidden", {}, `: ${option.name}`)));
}
