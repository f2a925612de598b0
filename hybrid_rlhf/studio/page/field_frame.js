// A labelled control that stands for an option: its help, and what the studio has against it, beside it.

import {make} from "./dom.js";

let count = 0;

// {node, control, say(text)} of an input, select or textarea. It is found again by `option` when the studio refuses that.
export function frame(draft, option, label, control, {help = "", after = [], isWide = false} = {}) {
  const id = control.id || (control.id = `field-${++count}`);
  const says = make("p.fault", {id: `${id}-fault`, hidden: true});
  const told = help ? make("p.help", {id: `${id}-help`}, help) : null;
  control.setAttribute("aria-describedby", [says.id, told?.id].filter(Boolean).join(" "));
  const isCheck = control.type === "checkbox";
  const title = make("label", {for: id}, label);
  const line = isCheck ? [make("div.check", {}, control, title)] : [title, control];
  const node = make(`div.field${isWide ? ".wide" : ""}`, {"data-option": option}, ...line, says, told, ...after);
  const field = {node, control, say: (text) => sayFault(node, control, says, text)};
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

// The field of an option: of itself, of a section that it is part of, or of a part of it. Of two the one that can be changed.
export function fieldOf(draft, option) {
  const isOpen = (field) => field.node.isConnected && !field.control.disabled;
  for (let name = option ?? ""; name; name = name.slice(0, Math.max(0, name.lastIndexOf(".")))) {
    const found = draft.fields.get(name)?.find(isOpen);
    if (found) return found;
  }
  const parts = option ? [...draft.fields].filter(([name]) => name.startsWith(`${option}.`)) : [];
  return parts.flatMap(([, fields]) => fields).find(isOpen) ?? null;
}

// Show what is wrong beside its option, and go there. False where no field stands for it.
export function goTo(draft, option, text = null) {
  const field = fieldOf(draft, option);
  if (!field) return false;
  if (text) field.say(text);
  draft.emit("reveal"); // a search may hide it
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
export function radios(name, legend, choices, chosen, set, kind = "row") {
  const id = `${name}-${++count}`;
  const one = ({value, title, help}) => make(`label.radio.${kind}`, {},
    make("input", {type: "radio", name: id, value, ...(value === chosen ? {checked: true} : {}), onchange: () => set(value)}),
    make("span", {}, make("span.title", {}, title), help ? make("span.help", {}, help) : null));
  return make(`fieldset.radios.${kind}s`, {}, make("legend", {class: legend.isHidden ? "hidden" : "label"}, legend.text),
    ...choices.map(one));
}

// Suggestions for a text input.
export function suggestions(id, choices) {
  return make("datalist", {id}, ...choices.map(({value, label}) => make("option", {value, label})));
}
