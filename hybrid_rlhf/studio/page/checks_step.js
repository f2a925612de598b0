// What can be seen before anything is trained: the rows as the model reads them, the memory, and the signal.

import {make} from "./dom.js";
import {button, goTo} from "./field_frame.js";
import {planBars} from "./plan_bars.js";
import {previewRows} from "./preview_rows.js";
import {patient} from "./run_draft.js";
import {same} from "./run_settings.js";
import {post} from "./server.js";
import {follow} from "./signal_check.js";

const REWARDS = ["reward_functions", "reward_model", "judge"];

// refuse(): whether something stands in the way, which is shown then. leaving: functions to call when the page is left.
export function checksStep(draft, refuse, leaving) {
  const asked = (settings) => ({stage: draft.state.stage, card: draft.state.card, settings});
  const preview = check(draft, refuse, {
    name: "preview", title: "What will the model see?", press: "Show the rows",
    about: "Three rows as the model reads them, and how many rows are lost on the way.",
    ask: (settings) => post("preview", asked(settings)), show: previewRows});
  const plan = check(draft, refuse, {
    name: "plan", title: "Will it fit, and how long does it take?", press: "Count the memory",
    about: "Counted from the model's shape, before any of it is loaded.",
    ask: (settings) => post("plan", {...asked(settings), memory: memoryOf(draft)}),
    show: (answer) => planBars(answer, (name, value) => apply(draft, name, value))});
  const hasSignal = draft.asks.some((each) => REWARDS.includes(each));
  return make("div.checks", {}, preview, plan, hasSignal ? signalPart(draft, refuse, leaving) : null);
}

// Bytes of a card that was chosen in place of the one that is here; null: what is free here, or, where there is none,
// the card that the settings are for.
function memoryOf(draft) {
  const {card} = draft.state;
  return draft.goals.card === "cpu" || card === draft.goals.card || card === "cpu" ? null : parseInt(card) * 2 ** 30;
}

function apply(draft, name, value) {
  const option = draft.options.find((each) => each.name === name);
  if (!option) return;
  draft.setOption(option, value);
  goTo(draft, name);
}

function check(draft, refuse, {name, title, about, press, ask, show}) {
  const result = make("div", {role: "status"});
  const old = make("p.notice", {hidden: true}, "The settings have changed since. Press the button again.");
  let asked = null;
  let isBusy = false;
  const go = async () => {
    if (isBusy) return;
    await draft.settled();
    if (isBusy || refuse()) return;
    isBusy = true;
    asked = draft.given();
    old.hidden = true;
    node.setAttribute("aria-disabled", "true");
    result.replaceChildren(make("p.help", {}, "Working … The first time takes up to half a minute."));
    try {
      result.replaceChildren(...show(await patient(() => ask(asked))));
    } catch (fault) {
      asked = null;
      tellFault(draft, fault, result);
    }
    isBusy = false;
    node.removeAttribute("aria-disabled");
  };
  const node = button(press, go, {id: `ask-${name}`});
  draft.onStage(["answer"], () => (old.hidden = asked === null || same(asked, draft.given())));
  return part(title, about, node, old, result);
}

const part = (title, about, press, ...rest) => make("section.card", {}, make("h3", {}, title),
  make("p.help", {}, about), make("div.buttons", {}, press), ...rest);

function tellFault(draft, fault, place) {
  place.replaceChildren(make("p.fault", {}, fault.message));
  if (fault.option) goTo(draft, fault.option, fault.message);
}

function signalPart(draft, refuse, leaving) {
  const place = make("div");
  let leave = null;
  leaving.push(() => leave?.());
  const show = (id) => {
    leave?.();
    leave = follow(id, place);
  };
  const go = async () => {
    await draft.settled();
    if (refuse()) return;
    try {
      const job = await post("jobs",
        {kind: "signal", stage: draft.state.stage, settings: draft.given(), run: draft.runName()});
      draft.update({signal: job.id});
      show(job.id);
    } catch (fault) {
      tellFault(draft, fault, place);
    }
  };
  if (draft.state.signal) show(draft.state.signal);
  const about = "The model answers a few prompts several times. Where all answers to a prompt score alike, nothing can "
    + "be learnt from it. This loads the model and takes a minute or more.";
  return part("Is there anything to learn from?", about, button("Check the signal", go, {id: "ask-signal"}), place);
}
