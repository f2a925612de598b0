// How it trains: the card, the usual options, and all others behind a fold, by section, with a search. An option of the
// launcher is a field that shows whether it differs from its default, with a way back.

import {fold, make, put} from "./dom.js";
import {frame, goTo, inline, selectField} from "./fields.js";
import {listOf, same} from "./settings.js";

// Options that other steps ask for.
const ASKED = ["output_dir", "model.model_name_or_path", "model.preset", "data.sources", "reward.functions",
  "reward.options", "reward.models", "roles.reward.model_name_or_path", "roles.teacher.model_name_or_path",
  "environment.tools", "environment.factory"];

export function optionsStep(draft) {
  const common = draft.options.filter((option) => option.is_common && !ASKED.includes(option.name));
  const others = draft.options.filter((option) => !common.includes(option));
  return make("div", {}, make("div.fields", {}, cardField(draft)),
    make("p.help", {}, "The options that people change most. Each has a sensible value already."),
    make("div.fields", {}, ...common.map((option) => optionField(draft, option))),
    notice(draft, () => draft.leftOut(), () => `Left out, as ${draft.state.stage} has no such option`),
    notice(draft, () => (draft.state.carried?.names ?? []).filter((name) => !draft.leftOut().includes(name)),
      () => `You set these for “${draft.state.carried?.title}”, and they count here too`),
    allOthers(draft, others));
}

function cardField(draft) {
  const {cards, card: here} = draft.goals, {card} = draft.state;
  const nameOf = (name) => (name === "cpu" ? "none, the processor alone" : `${parseInt(name)} GB`);
  return selectField(draft, "card", "Your graphics card", {id: "card", isWide: true,
    choices: cards.map((name) => [name, nameOf(name) + (name === here ? " (found here)" : "")]),
    value: cards.includes(card) ? card : here, set: (value) => draft.update({card: value}),
    help: "Chooses settings that fit its memory. What you set yourself goes first."}).node;
}

// Options set by hand that this stage does not have, and those that were set for another goal and count here too.
function notice(draft, namesOf, text) {
  const line = make("p.notice", {hidden: true});
  draft.follow("state", () => {
    const names = namesOf().filter((name) => draft.isOwn(name));
    const forget = inline("Forget them", () => names.forEach((name) => draft.dropOption(name)));
    line.hidden = !names.length;
    const values = names.map((name) => `${name} ${written(draft.state.settings[name])}`).join(", ");
    line.replaceChildren(`${text()}: ${values}. `, forget);
  });
  return line;
}

function allOthers(draft, options) {
  const count = make("p.help", {role: "status"});
  const search = make("input", {type: "search", id: "option-search", autocomplete: "off", spellcheck: "false",
    placeholder: "such as learning rate", oninput: () => show()});
  const bySection = Map.groupBy(options, (option) => option.section);
  const sections = [...bySection].map(([name, members]) => section(draft, name, members));
  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = sections.map((part) => part.show(words)).reduce((a, b) => a + b, 0);
    count.textContent = words.length ? `${shown} of ${options.length} options` : `${options.length} options`;
  };
  draft.follow("reveal", () => {
    if (!search.value) return;
    search.value = "";
    show();
  });
  show();
  return make("details.all", {},
    make("summary", {}, `All other options of ${draft.state.stage} `, changedCount(draft, options)),
    make("div.entry", {}, make("label", {for: "option-search"}, "Search in names and help"), search),
    count, ...sections.map((part) => part.node));
}

// "(2 changed)" of these options.
function changedCount(draft, options) {
  const node = make("span.mark");
  draft.follow("state", () => {
    const many = options.filter((option) => draft.isOwn(option.name)).length;
    node.textContent = many ? `(${many} changed)` : "";
  });
  return node;
}

// {node, show(words) -> how many of its options have them all}
function section(draft, name, options) {
  const fields = new Map(options.map((option) => [option, optionField(draft, option)]));
  const title = SECTIONS[name] ?? SECTIONS[name.split(".").at(-1)] ?? name;
  const node = fold(`${title} `, make("div.fields", {}, ...fields.values()));
  node.firstChild.append(changedCount(draft, options));
  const show = (words) => {
    const matches = options.filter((option) => words.every((word) => textOf(option).includes(word)));
    for (const [option, field] of fields) field.hidden = !matches.includes(option);
    node.hidden = !matches.length;
    if (words.length) node.open = matches.length > 0;
    else if (!node.contains(document.activeElement)) node.open = false;
    return matches.length;
  };
  return {node, show};
}

const textOf = (option) =>
  `${option.name} ${option.name.replaceAll("_", " ")} ${titleOf(option)} ${option.help}`.toLowerCase();

// ---- one option

// The field of an option. It follows the draft until the stage changes.
function optionField(draft, option) {
  const {name} = option, input = inputOf(option);
  const mark = make("p.mark", {hidden: true}), elsewhere = make("p.mark", {hidden: true});
  const label = make("span", {}, titleOf(option), " ", make("code", {}, name));
  const empty = make("p.help", {hidden: option.default !== null || !option.by_table});
  const field = frame(draft, name, label, input.node,
    {help: option.help, after: [empty, mark, elsewhere], isWide: option.kind === "json", isListed: true});
  const isTyped = input.node.localName !== "select" && input.node.type !== "checkbox";
  input.node.addEventListener(isTyped ? "input" : "change", () => take(draft, option, input, field));
  const back = () => {
    draft.dropOption(name);
    input.write(draft.base(option));
    field.say(null);
    input.node.focus();
  };
  const aside = (text, onclick) => inline(text, onclick, {}, make("span.hidden", {}, `: ${name}`));
  elsewhere.append("Set by a step above. ", aside("Change it there", () => goTo(draft, name)));
  draft.follow("state answer", () => {
    const isGuided = name in draft.guided();
    input.node.disabled = isGuided;
    elsewhere.hidden = !isGuided;
    put(empty, `Left empty: ${draft.answer?.left_empty?.[name] ?? option.by_table}.`);
    if (document.activeElement !== input.node && !draft.unread.has(name)) input.write(draft.value(option));
    showMark(draft, option, mark, isGuided, (text) => aside(text, back));
  });
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

// Show whether an option differs from its default, and why.
function showMark(draft, option, mark, isGuided, backButton) {
  const isOwn = draft.isOwn(option.name) && !isGuided;
  const isOther = !isOwn && !isGuided && !same(draft.value(option), option.default);
  const base = isOwn ? draft.base(option) : option.default;
  const text = base === null && option.by_table ? "the method's own" : written(base);
  const state = isOwn ? `own ${text}` : isOther ? "other" : "";
  if (mark.dataset.state === state) return;
  mark.dataset.state = state;
  mark.hidden = !state;
  if (isOther) mark.replaceChildren(`Set by your choices above; the default is ${text}.`);
  if (isOwn) mark.replaceChildren("Changed by you. ", backButton(`Back to ${text}`));
}

// ---- values as text, and back

// A value as a person writes it.
export function written(value) {
  if (value === null || value === undefined) return "null";
  if (typeof value === "object" && !Array.isArray(value)) return JSON.stringify(value);
  return asText(value) || "nothing";
}

function asText(value) {
  if (typeof value === "number" && value !== 0 && Math.abs(value) < 1e-3) return value.toExponential();
  if (!Array.isArray(value)) return String(value);
  const isPlain = (item) => typeof item !== "object" && item !== "" && !/[,[\]{}]|^\s|\s$/.test(String(item));
  return value.every(isPlain) ? value.join(", ") : JSON.stringify(value);
}

// The input of an option: {node, read() -> value (throws an Error that tells what is wrong), write(value)}.
function inputOf(option) {
  if (option.kind === "bool" && !option.null) {
    const node = make("input", {type: "checkbox"});
    return {node, read: () => node.checked, write: (value) => (node.checked = value === true)};
  }
  if (option.kind === "bool") return choiceOf([true, false], option);
  return option.kind === "choice" ? choiceOf(option.choices, option) : typed(option);
}

function choiceOf(choices, option) {
  const node = make("select", {}, ...choices.map((value) => make("option", {value: String(value)}, String(value))));
  if (option.null) node.prepend(make("option", {value: ""}, "null (goes by the rest)"));
  const read = () => choices.find((value) => String(value) === node.value) ?? (node.value === "" ? null : node.value);
  const write = (value) => {
    const text = String(value ?? "");
    if (![...node.options].some((known) => known.value === text)) node.append(make("option", {value: text}, text));
    node.value = text;
  };
  return {node, read, write};
}

function typed(option) {
  const {kind} = option, isJson = kind === "json";
  const empty = option.by_table ? "by the method" : "null";
  const node = make(isJson ? "textarea" : "input", {autocomplete: "off", spellcheck: "false", rows: isJson && 2,
    type: !isJson && "text", inputmode: {int: "numeric", float: "decimal"}[kind],
    placeholder: option.null ? empty : kind === "list" && "separated by commas"});
  const shown = (value) => isJson && typeof value !== "string" ? JSON.stringify(value) : asText(value);
  const write = (value) => (node.value = value === null || value === undefined ? "" : shown(value));
  return {node, write, read: () => parsed(node.value.trim(), option)};
}

// Parse what is typed; text where a number belongs is sent as it is, and the launcher refuses it.
function parsed(text, {kind, null: canBeNull, default: usual}) {
  if (text === "" && canBeNull) return null;
  if (kind === "int" || kind === "float") return asNumber(text);
  if (kind === "list") return /^[[{]/.test(text) ? json(text) : asList(text);
  if (kind !== "json") return text;
  if (text === "") return Array.isArray(usual) ? [] : usual && typeof usual === "object" ? {} : "";
  if (/^[[{"]/.test(text)) return json(text);
  return {true: true, false: false}[text] ?? asNumber(text);
}

const asNumber = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);

function asList(text) {
  const items = listOf(text).map(asNumber);
  return items.every((item) => typeof item === "number") ? items : listOf(text);
}

function json(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error('This is not complete JSON, such as {"name": "text", "list": [1, 2]}');
  }
}

// ---- titles of options and sections; an option's own name stands beside its title

const TITLES = {
  "data.max_length": "Longest row, tokens", "data.max_prompt_length": "Longest prompt, tokens",
  "data.packing": "Several examples to a row", "data.split": "Shares of the three stages",
  "distill.sampling.max_new_tokens": "Longest answer, tokens",
  "model.gradient_checkpointing": "Compute activations again, to save memory", "model.load_in_4bit": "Base in 4 bits",
  "model.lora.alpha": "Scale of the adapters (LoRA)", "model.lora.r": "Rank of the adapters (LoRA)",
  "ppo.kl_coef": "Price of drifting from the start (KL)", "ppo.sampling.max_new_tokens": "Longest answer, tokens",
  "ppo.sampling.num_samples": "Answers to each prompt", "roles.actor.learning_rate": "Learning rate",
  "roles.critic.learning_rate": "Learning rate of the critic", "train.eval_steps": "Steps between evaluations",
  "train.max_steps": "Steps", "train.num_train_epochs": "Passes over the data",
  "train.per_device_train_batch_size": "Rows of a step",
};
const SECTIONS = { // by the whole name, or its last part
  "": "The run itself", compare: "The table at the end", data: "The data", distill: "Learning from a teacher",
  dpo: "DPO", engine: "How training is laid out", environment: "Tools and environments", judge: "The judge",
  model: "The model", "model.lora": "Adapters (LoRA)", online: "Online DPO", ppo: "PPO",
  rejection: "Rejection sampling", reward: "Rewards", reward_sources: "Rewards beside the reward model",
  roles: "Who shares weights", "roles.actor": "The model that is trained", "roles.critic": "The critic",
  "roles.ref": "The reference", "roles.reward": "The reward model", "roles.teacher": "The teacher",
  sampling: "How answers are drawn", "stages.ppo": "Schedule of stage 3, PPO",
  "stages.reward": "Schedule of stage 2, the reward model", "stages.sft": "Schedule of stage 1, imitating",
  train: "The schedule",
};
const STAGES = {sft: "stage 1", reward: "stage 2", ppo: "stage 3"};

function titleOf({name}) {
  const [, stage, inner] = /^stages\.(\w+)\.(.*)$/.exec(name) ?? [null, null, name];
  const words = inner.split(".").at(-1).replaceAll("_", " ");
  const title = TITLES[stage ? `train.${inner}` : inner] ?? words[0].toUpperCase() + words.slice(1);
  return stage ? `${title}, ${STAGES[stage] ?? stage}` : title;
}
