// How it trains: the card, the usual options, and all others behind a fold, by section, with a search.

import {make} from "./dom.js";
import {frame, inline} from "./field_frame.js";
import {optionField} from "./option_fields.js";
import {sectionTitle, titleOf} from "./option_words.js";

// Options that steps of their own ask for.
const ASKED = ["output_dir", "model.model_name_or_path", "model.preset", "data.sources", "reward.functions",
  "reward.options", "reward.models", "roles.reward.model_name_or_path", "roles.teacher.model_name_or_path",
  "environment.tools", "environment.factory"];

export function optionsStep(draft) {
  const common = draft.options.filter((option) => option.is_common && !ASKED.includes(option.name));
  const others = draft.options.filter((option) => !common.includes(option));
  return make("div", {}, make("div.fields", {}, cardField(draft)),
    make("p.help", {}, "The options that people change most. Each has a sensible value already."),
    make("div.fields", {}, ...common.map((option) => optionField(draft, option))),
    leftOut(draft), allOthers(draft, others));
}

function cardField(draft) {
  const {cards, card} = draft.goals;
  const one = (each) => make("option", {value: each}, cardName(each) + (each === card ? " (found here)" : ""));
  const node = make("select", {id: "card", onchange: () => draft.update({card: node.value})}, ...cards.map(one));
  node.value = cards.includes(draft.state.card) ? draft.state.card : card;
  const help = "Chooses settings that fit its memory. What you set yourself goes first.";
  return frame(draft, "card", "Your graphics card", node, {isWide: true, help}).node;
}

const cardName = (card) => (card === "cpu" ? "none, the processor alone" : `${parseInt(card)} GB`);

function leftOut(draft) {
  const line = make("p.notice", {hidden: true});
  const show = () => {
    const names = draft.leftOut();
    const forget = inline("Forget them", () => names.forEach((name) => draft.dropOption(name)));
    line.hidden = !names.length;
    line.replaceChildren(`Left out, as ${draft.state.stage} has no such option: ${names.join(", ")}. `, forget);
  };
  draft.onStage(["state"], show);
  show();
  return line;
}

function allOthers(draft, options) {
  const count = make("p.help", {role: "status"});
  const search = make("input", {type: "search", id: "option-search", autocomplete: "off", spellcheck: "false",
    placeholder: "such as learning rate"});
  const names = [...new Set(options.map((option) => option.section))];
  const sections = names.map((name) => section(draft, name, options.filter((option) => option.section === name)));
  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = sections.map((each) => each.show(words)).reduce((a, b) => a + b, 0);
    count.textContent = words.length ? `${shown} of ${options.length} options` : `${options.length} options`;
  };
  search.addEventListener("input", show);
  draft.onStage(["reveal"], () => {
    if (!search.value) return;
    search.value = "";
    show();
  });
  show();
  return make("details.all", {},
    make("summary", {}, `All other options of ${draft.state.stage} `, changedCount(draft, options)),
    make("div.entry", {}, make("label", {for: "option-search"}, "Search in names and help"), search),
    count, ...sections.map((each) => each.node));
}

// "(2 changed)" of these options.
function changedCount(draft, options) {
  const node = make("span.mark");
  const show = () => {
    const many = options.filter((option) => draft.isOwn(option.name)).length;
    node.textContent = many ? `(${many} changed)` : "";
  };
  draft.onStage(["state"], show);
  show();
  return node;
}

// {node, show(words) -> how many of its options have them all}
function section(draft, name, options) {
  const fields = new Map(options.map((option) => [option, optionField(draft, option)]));
  const summary = make("summary", {}, `${sectionTitle(name)} `, changedCount(draft, options));
  const node = make("details", {}, summary, make("div.fields", {}, ...fields.values()));
  const show = (words) => {
    const found = options.filter((option) => words.every((word) => textOf(option).includes(word)));
    for (const [option, field] of fields) field.hidden = !found.includes(option);
    node.hidden = !found.length;
    if (words.length) node.open = found.length > 0;
    else if (!node.contains(document.activeElement)) node.open = false;
    return found.length;
  };
  return {node, show};
}

const textOf = (option) =>
  `${option.name} ${option.name.replaceAll("_", " ")} ${titleOf(option)} ${option.help}`.toLowerCase();
