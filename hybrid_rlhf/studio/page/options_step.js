// Step 5: the card, the usual options, and all others behind a fold, by section, with a search.

import {make} from "./dom.js";
import {frame} from "./field_frame.js";
import {optionField, titleOf} from "./option_fields.js";

// Options that steps of their own ask for.
const ASKED = /^(model\.(model_name_or_path|preset)|data\.sources|reward\.(functions|options|models|judge\..*)|roles\.(reward|teacher)\.model_name_or_path|environment\.(tools|factory)|output_dir)$/;

const SECTIONS = {"": "The run itself", model: "The model", "model.lora": "Adapters (LoRA)", data: "The data", train: "The schedule",
  engine: "How training is laid out", roles: "Who shares weights", "roles.actor": "The model that is trained", "roles.ref": "The reference",
  "roles.critic": "The critic", "roles.reward": "The reward model", "roles.teacher": "The teacher", reward: "Rewards",
  "reward.judge": "The judge", reward_sources: "Rewards beside the reward model", "reward_sources.judge": "The judge",
  environment: "Tools and environments", ppo: "PPO", "ppo.sampling": "How answers are drawn", distill: "Learning from a teacher",
  "distill.sampling": "How answers are drawn", dpo: "DPO", online: "Online DPO", "online.sampling": "How answers are drawn",
  rejection: "Rejection sampling", "rejection.sampling": "How answers are drawn", "stages.sft": "Schedule of stage 1, imitating",
  "stages.reward": "Schedule of stage 2, the reward model", "stages.ppo": "Schedule of stage 3, PPO", compare: "The table at the end"};

export function optionsStep(draft) {
  const common = draft.options.filter((option) => option.is_common && !ASKED.test(option.name));
  const others = draft.options.filter((option) => !common.includes(option));
  return make("div", {}, make("div.fields", {}, cardField(draft)),
    common.length ? make("p.help", {}, "The options that people change most. Each has a sensible value already.") : null,
    make("div.fields", {}, ...common.map((option) => optionField(draft, option))),
    leftOut(draft), allOthers(draft, others));
}

function cardField(draft) {
  const {cards, card} = draft.goals;
  const node = make("select", {id: "card", onchange: () => draft.update({card: node.value})},
    ...cards.map((each) => make("option", {value: each}, cardName(each) + (each === card ? " (found here)" : ""))));
  node.value = cards.includes(draft.state.card) ? draft.state.card : card;
  return frame(draft, "card", "Your graphics card", node,
    {isWide: true, help: "Chooses settings that fit its memory. What you set yourself goes first."}).node;
}

const cardName = (card) => (card === "cpu" ? "none, the processor alone" : `${parseInt(card)} GB`);

function leftOut(draft) {
  const line = make("p.notice", {hidden: true});
  const show = () => {
    const names = draft.leftOut();
    line.hidden = !names.length;
    line.replaceChildren(`Left out, as the method ${draft.state.stage} has no such option: ${names.join(", ")}. `,
      make("button.quiet-button", {type: "button", onclick: () => names.forEach((name) => draft.dropOption(name))}, "Forget them"));
  };
  draft.onStage(["state"], show);
  show();
  return line;
}

function allOthers(draft, options) {
  const count = make("p.help", {role: "status"});
  const search = make("input", {type: "search", id: "option-search", autocomplete: "off", spellcheck: "false", placeholder: "such as learning rate"});
  const sections = [...new Set(options.map((option) => option.section))].map((name) =>
    section(draft, SECTIONS[name] ?? name, options.filter((option) => option.section === name)));
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
  const changed = make("span.mark");
  const tellChanged = () => (changed.textContent = countText(options.filter((option) => draft.isOwn(option.name)).length));
  draft.onStage(["state"], tellChanged);
  tellChanged();
  show();
  return make("details.all", {}, make("summary", {}, `All other options of ${draft.state.stage} `, changed),
    make("div.entry", {}, make("label", {for: "option-search"}, "Search in names and help"), search), count, ...sections.map((each) => each.node));
}

const countText = (count) => (count ? `(${count} changed)` : "");

function section(draft, name, options) {
  const changed = make("span.mark");
  const fields = new Map(options.map((option) => [option, optionField(draft, option)]));
  const node = make("details", {}, make("summary", {}, `${name} `, changed), make("div.fields", {}, ...fields.values()));
  const tell = () => (changed.textContent = countText(options.filter((option) => draft.isOwn(option.name)).length));
  draft.onStage(["state"], tell);
  tell();
  const show = (words) => {
    const fits = (option) => words.every((word) => textOf(option).includes(word));
    const found = options.filter(fits);
    for (const [option, field] of fields) field.hidden = !found.includes(option);
    node.hidden = !found.length;
    if (words.length) node.open = found.length > 0;
    else if (!node.contains(document.activeElement)) node.open = false;
    return found.length;
  };
  return {node, show};
}

const textOf = (option) => `${option.name} ${option.name.replaceAll("_", " ")} ${titleOf(option)} ${option.help}`.toLowerCase();
