// A labelled control that stands for an option: its help, and what the studio has against it, beside it.

import {make} from "./dom.js";

let count = 0;

// {node, control, say(text)} of an input, select or textarea. It is found again by `option` when the studio refuses that.
export function frame(draft, option, label, control, {help = "", after = [], isWide = false, isListed = false} = {}) {
  const id = control.id || (control.id = `field-${++count}`);
  const says = make("p.fault", {id: `${id}-fault`, hidden: true});
  const told = help ? make("p.help", {id: `${id}-help`}, help) : null;
  control.setAttribute("aria-describedby", [says.id, told?.id].filter(Boolean).join(" "));
  const isCheck = control.type === "checkbox";
  const title = make("label", {for: id}, label);
  const line = isCheck ? [make("div.check-line", {}, control, title)] : [title, control];
  const node = make(`div.entry${isWide ? ".wide" : ""}`, {"data-option": option}, ...line, says, told, ...after);
  const field = {option, node, control, isListed, say: (text) => sayFault(node, control, says, text)};
  draft.fields.set(option, [...(draft.fields.get(option) ?? []), field]);
  return field;
}

function sayFault(node, control, says, text) {
  says.textContent = text ?? "";
  says.hidden = !text;
  node.classList.toggle("refused", Boolean(text));
  if (text) control.setAttribute("aria-invalid", "true");
  else control.removeAttribute("aria-invalid");
}

// The field where an option is changed, or a part of it, or what it is a part of: one of the steps before one of the list.
// text: of a refusal, which may name a part that has a field of its own.
export function fieldOf(draft, option, text = "") {
  const open = [...draft.fields].flatMap(([name, fields]) => fields.filter(isOpen).map((field) => ({name, field})));
  const named = open.filter(({name}) => name.includes(".") && text.includes(name) && (!option || name.startsWith(`${option}.`)));
  const wanted = named.sort((a, b) => b.name.length - a.name.length)[0]?.name ?? alias(option, text);
  const isPart = ({name}) => name.startsWith(`${wanted}.`);
  const ways = [({name, field}) => name === wanted && !field.isListed, (each) => isPart(each) && !each.field.isListed,
    ({name}) => name === wanted, isPart, ({name}) => wanted.startsWith(`${name}.`)];
  return wanted ? ways.map((way) => open.find(way)).find(Boolean)?.field ?? null : null;
}

// The name of the run says where it goes.
function alias(option, text) {
  if (option === "output_dir" || (!option && text.startsWith("output_dir"))) return "run";
  const [, name] = /builtin:(\w+)/.exec(text) ?? [];
  return option === "reward.functions" && name ? `reward.options.${name}` : option;
}

const isOpen = ({node, control}) => node.isConnected && !control.disabled && !node.closest("[hidden]");

// Show what is wrong beside its option, and go there. False where no field stands for it.
export function goTo(draft, option, text = null) {
  draft.emit("reveal"); // a search may hide it
  const field = fieldOf(draft, option, text ?? "");
  if (!field) return false;
  if (text) field.say(text);
  for (let node = field.node.parentElement; node; node = node.parentElement) if (node.localName === "details") node.open = true;
  field.control.focus();
  field.control.scrollIntoView({block: "center"});
  return true;
}

// A text input that follows draft.state[...]: get and set are its place there.
export function textInput({value, set, ...properties}) {
  return make("input", {type: "text", autocomplete: "off", spellcheck: "false", ...properties, value,
    oninput: (event) => set(event.target.value)});
}

// One of several, as radio buttons: choices [{value, title, help}].
export function radios(name, legend, choices, chosen, set, kind = "radio-row") {
  const id = `${name}-${++count}`;
  const one = ({value, title, help}) => make(`label.radio.${kind}`, {},
    make("input", {type: "radio", name: id, value, ...(value === chosen ? {checked: true} : {}), onchange: () => set(value)}),
    make("span", {}, make("span.title", {}, title), help ? make("span.help", {}, help) : null));
  return make(`fieldset.radios.${kind}s`, {}, make("legend", {class: legend.isHidden ? "hidden" : "question"}, legend.text),
    ...choices.map(one));
}

// Suggestions for a text input.
export function suggestions(id, choices) {
  return make("datalist", {id}, ...choices.map(({value, label}) => make("option", {value, label})));
}
