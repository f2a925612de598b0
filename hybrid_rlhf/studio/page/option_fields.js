// One option of the launcher as a field: what kind of input it takes, whether it differs from its default, a way back.

import {make} from "./dom.js";
import {frame, goTo, inline} from "./field_frame.js";
import {titleOf} from "./option_words.js";
import {listOf, same} from "./run_settings.js";

// A value as a person writes it.
export function written(value) {
  if (value === null || value === undefined) return "null";
  if (typeof value === "number") return numberText(value);
  if (Array.isArray(value)) return value.length ? listText(value) : "nothing";
  if (typeof value === "object") return JSON.stringify(value);
  return value === "" ? "nothing" : String(value);
}

const numberText = (value) => (value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential() : String(value));

function listText(list) {
  const isPlain = (each) => typeof each !== "object" && each !== "" && !/[,[\]{}]|^\s|\s$/.test(String(each));
  return list.every(isPlain) ? list.join(", ") : JSON.stringify(list);
}

// The input of a kind: {node, read() -> value (throws an Error with what is wrong), write(value)}.
function inputOf(option) {
  if (option.kind === "bool" && !option.null) return checkbox();
  if (option.kind === "bool") return select([true, false], option);
  return option.kind === "choice" ? select(option.choices, option) : typed(option);
}

function checkbox() {
  const node = make("input", {type: "checkbox"});
  return {node, read: () => node.checked, write: (value) => (node.checked = value === true)};
}

function select(choices, option) {
  const node = make("select", {}, ...choices.map((each) => make("option", {value: String(each)}, String(each))));
  if (option.null) node.prepend(make("option", {value: ""}, "null (goes by the rest)"));
  const read = () => choices.find((each) => String(each) === node.value) ?? (node.value === "" ? null : node.value);
  const write = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    if (![...node.options].some((each) => each.value === text)) node.append(make("option", {value: text}, text));
    node.value = text;
  };
  return {node, read, write};
}

function typed(option) {
  const tag = option.kind === "json" ? "textarea" : "input";
  const node = make(tag, {autocomplete: "off", spellcheck: "false", placeholder: hintOf(option)});
  if (tag === "textarea") node.rows = 2;
  else node.type = "text";
  if (option.kind === "int") node.inputMode = "numeric";
  if (option.kind === "float") node.inputMode = "decimal";
  return {node, read: () => parsed(node.value.trim(), option), write: (value) => (node.value = shown(value, option))};
}

function hintOf(option) {
  if (option.null) return option.by_table ? "by the method" : "null";
  return option.kind === "list" ? "separated by commas" : null;
}

function shown(value, option) {
  if (value === null || value === undefined) return "";
  if (option.kind === "json") return typeof value === "string" ? value : JSON.stringify(value);
  if (Array.isArray(value)) return value.length ? listText(value) : "";
  return typeof value === "number" ? numberText(value) : String(value);
}

// What is typed as a value; what is no number is sent as it is, for the launcher's own refusal.
function parsed(text, option) {
  if (text === "" && option.null) return null;
  if (option.kind === "int" || option.kind === "float") return asNumber(text);
  if (option.kind === "list") return /^[[{]/.test(text) ? json(text) : asList(text);
  if (option.kind !== "json") return text;
  if (text === "") return emptyOf(option.default);
  if (/^[[{"]/.test(text)) return json(text);
  return {true: true, false: false}[text] ?? asNumber(text);
}

const asNumber = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);

function asList(text) {
  const items = listOf(text).map(asNumber);
  return items.every((each) => typeof each === "number") ? items : listOf(text);
}

function emptyOf(value) {
  if (Array.isArray(value)) return [];
  return value && typeof value === "object" ? {} : "";
}

function json(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error('This is not complete JSON, such as {"name": "text", "list": [1, 2]}');
  }
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
  const back = () => {
    draft.dropOption(option.name);
    input.write(draft.base(option));
    field.say(null);
    input.node.focus();
  };
  const follow = () => {
    const isGuided = option.name in draft.guided();
    input.node.disabled = isGuided;
    if (document.activeElement !== input.node && !draft.unread.has(option.name)) input.write(draft.value(option));
    showMark(draft, option, mark, isGuided, back);
    showElsewhere(draft, option, elsewhere, isGuided);
  };
  draft.onStage(["state", "answer"], follow);
  follow();
  return field.node;
}

function helpOf(option) {
  return option.by_table && option.default === null ? `${option.help} Left empty: ${option.by_table}.` : option.help;
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

// Whether it differs from its default, and by whom.
function showMark(draft, option, mark, isGuided, back) {
  const isOwn = draft.isOwn(option.name) && !isGuided;
  const isOther = !isOwn && !isGuided && !same(draft.value(option), option.default);
  const base = baseText(isOwn ? draft.base(option) : option.default, option);
  const state = isOwn ? `own ${base}` : isOther ? "other" : "";
  if (mark.dataset.state === state) return;
  mark.dataset.state = state;
  mark.hidden = !state;
  if (isOther) mark.replaceChildren(`Set by your choices above; the default is ${base}.`);
  if (!isOwn) return;
  mark.replaceChildren("Changed by you. ", inline(`Back to ${base}`, back));
  mark.lastChild.append(make("span.hidden", {}, `: ${option.name}`));
}

const baseText = (value, option) => (value === null && option.by_table ? "the method's own" : written(value));

function showElsewhere(draft, option, elsewhere, isGuided) {
  elsewhere.hidden = !isGuided;
  if (!isGuided || elsewhere.childNodes.length) return;
  elsewhere.append("Set by a step above. ", inline("Change it there", () => goTo(draft, option.name)));
  elsewhere.lastChild.append(make("span.hidden", {}, `: ${option.name}`));
}
