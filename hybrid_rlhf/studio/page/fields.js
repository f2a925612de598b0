// Fields of the page of a new run: labelled controls that stand for an option, with its help, and with what the studio
// has against it beside it.

import {make, select} from "./dom.js";

let count = 0;

// {option, node, control, say(text)} of an input, select or textarea. When the studio refuses `option`, the field is
// found again, and say() shows why.
export function frame(draft, option, label, control, {help = "", after = [], isWide = false, isListed = false} = {}) {
  const id = control.id || (control.id = `field-${++count}`);
  const fault = make("p.fault", {id: `${id}-fault`, hidden: true});
  const about = help ? make("p.help", {id: `${id}-help`}, help) : null;
  control.setAttribute("aria-describedby", [fault.id, about?.id].filter(Boolean).join(" "));
  const title = make("label", {for: id}, label);
  const line = control.type === "checkbox" ? [make("div.check-line", {}, control, title)] : [title, control];
  const node = make(`div.entry${isWide ? ".wide" : ""}`, {"data-option": option}, ...line, fault, about, ...after);
  const say = (text) => {
    fault.textContent = text ?? "";
    fault.hidden = !text;
    node.classList.toggle("refused", Boolean(text));
    if (text) control.setAttribute("aria-invalid", "true");
    else control.removeAttribute("aria-invalid");
  };
  const field = {option, node, control, isListed, say};
  draft.fields.set(option, [...(draft.fields.get(option) ?? []), field]);
  return field;
}

// A field of text. key: of draft.state, which it shows and changes; or value, and set(text) at each key. More: see
// `frame`; the rest are properties of the input.
export function textField(draft, option, label, {key, value = draft.state[key],
  set = (text) => draft.update({[key]: text}), help, after, isWide, ...properties}) {
  return frame(draft, option, label, textInput({value, set, ...properties}), {help, after, isWide});
}

// A text input; set(text) is called at each key.
export function textInput({value, set, ...properties}) {
  const oninput = (event) => set(event.target.value);
  return make("input", {type: "text", autocomplete: "off", spellcheck: "false", ...properties, value, oninput});
}

// A field with a choice of one: choices [[value, text]].
export function selectField(draft, option, label, {id, choices, value, set, ...more}) {
  const node = select({id, onchange: () => set(node.value)}, choices, value);
  return frame(draft, option, label, node, more);
}

// One of several, as radio buttons: choices [{value, title, help}]; legend {text, isHidden}.
export function radios(name, legend, choices, chosen, set, kind = "radio-row") {
  const group = `${name}-${++count}`;
  const one = ({value, title, help}) => make(`label.radio.${kind}`, {},
    make("input", {type: "radio", name: group, value, checked: value === chosen, onchange: () => set(value)}),
    make("span", {}, make("span.title", {}, title), help ? make("span.help", {}, help) : null));
  return make(`fieldset.radios.${kind}s`, {},
    make("legend", {class: legend.isHidden ? "hidden" : "question"}, legend.text), ...choices.map(one));
}

// Radio buttons, and below them the nodes that fill() makes for the one that is chosen.
export function radioPart(name, text, choices, chosen, set, fill, place = make("div")) {
  const show = () => place.replaceChildren(...fill());
  const buttons = radios(name, {text}, choices, chosen, (value) => {
    set(value);
    show();
  });
  show();
  return make("div", {}, buttons, place);
}

// Suggestions for a text input.
export function suggestions(id, choices) {
  return make("datalist", {id}, ...choices.map(({value, label}) => make("option", {value, label})));
}

// A button that reads as a part of a sentence.
export function inline(text, onclick, properties = {}, ...more) {
  return make("button.quiet-button", {type: "button", onclick, ...properties}, text, ...more);
}

// ---- finding the field of an option

// The field where an option is changed, or a part of it, or what it is a part of; one of the steps before one of the
// list of all. text: of a refusal, which may name a part that has a field of its own.
export function fieldOf(draft, option, text = "") {
  const open = [...draft.fields].flatMap(([name, fields]) => fields.filter(isOpen).map((field) => ({name, field})));
  const isNamed = ({name}) => name.includes(".") && text.includes(name) && (!option || name.startsWith(`${option}.`));
  const [named] = open.filter(isNamed).sort((a, b) => b.name.length - a.name.length);
  const wanted = named?.name ?? alias(option, text);
  if (!wanted) return null;
  const isIt = ({name}) => name === wanted;
  const isPart = ({name}) => name.startsWith(`${wanted}.`);
  const isWhole = ({name}) => wanted.startsWith(`${name}.`);
  const steps = open.filter(({field}) => !field.isListed);
  const best = steps.find(isIt) ?? steps.find(isPart) ?? open.find(isIt) ?? open.find(isPart) ?? open.find(isWhole);
  return best?.field ?? null;
}

const isOpen = ({node, control}) => node.isConnected && !control.disabled && !node.closest("[hidden]");

// The name of the run sets output_dir; a ready-made function has its settings beside it.
function alias(option, text) {
  if (option === "output_dir" || (!option && text.startsWith("output_dir"))) return "run";
  const [, name] = /builtin:(\w+)/.exec(text) ?? [];
  return option === "reward.functions" && name ? `reward.options.${name}` : option;
}

// Show what is wrong beside its option, and focus it. False where no field stands for it.
export function goTo(draft, option, text = null) {
  if (fieldOf(draft, option, text ?? "")?.option !== option) draft.emit("reveal"); // a search may hide it
  const field = fieldOf(draft, option, text ?? "");
  if (!field) return false;
  if (text) field.say(text);
  for (let node = field.node.parentElement; node; node = node.parentElement) {
    if (node.localName === "details") node.open = true;
  }
  field.control.focus();
  field.control.scrollIntoView({block: "center"});
  return true;
}
