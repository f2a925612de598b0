// Step 6: what can be seen before anything is trained. The rows as the model reads them, the memory, and the signal.

import {make} from "./dom.js";
import {post} from "./server.js";
import {goTo} from "./field_frame.js";
import {planBars} from "./plan_bars.js";
import {previewRows} from "./preview_rows.js";
import {follow} from "./signal_check.js";
import {patient} from "./run_draft.js";
import {same} from "./run_settings.js";

const REWARDS = ["reward_functions", "reward_model", "judge"];

// leaving: functions that are called when the page is left.
export function checksStep(draft, refuse, leaving) {
  const preview = check(draft, refuse, {name: "preview", title: "What will the model see?", button: "Show the rows",
    about: "Three rows as the model reads them, and how many rows are lost on the way.",
    ask: (settings) => post("preview", {stage: draft.state.stage, settings, card: draft.state.card}), show: previewRows});
  const plan = check(draft, refuse, {name: "plan", title: "Will it fit, and how long does it take?", button: "Count the memory",
    about: "Counted from the model's shape, before any of it is loaded.",
    ask: (settings) => post("plan", {stage: draft.state.stage, settings, card: draft.state.card, memory: memoryOf(draft)}),
    show: (answer) => planBars(answer, (name, value) => apply(draft, name, value))});
  const hasSignal = draft.asks.some((each) => REWARDS.includes(each));
  return make("div.checks", {}, preview, plan, hasSignal ? signalPart(draft, refuse, leaving) : null);
}

// Bytes of a card that was chosen in place of the one that is here; null: what is free here, or, where there is none, the
// card that the settings are for.
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

function check(draft, refuse, {name, title, about, button, ask, show}) {
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
    press.setAttribute("aria-disabled", "true");
    result.replaceChildren(make("p.help", {}, "Working … The first time takes up to half a minute."));
    try {
      result.replaceChildren(...show(await patient(() => ask(asked))));
    } catch (fault) {
      result.replaceChildren(make("p.fault", {}, fault.message));
      if (fault.option) goTo(draft, fault.option, fault.message);
      asked = null;
    }
    isBusy = false;
    press.removeAttribute("aria-disabled");
  };
  const press = make("button", {type: "button", id: `ask-${name}`, onclick: go}, button);
  draft.onStage(["answer"], () => (old.hidden = asked === null || same(asked, draft.given())));
  return make("section.card", {}, make("h3", {}, title), make("p.help", {}, about), make("div.buttons", {}, press), old, result);
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
      const job = await post("jobs", {kind: "signal", stage: draft.state.stage, settings: draft.given(), run: draft.runName()});
      draft.update({signal: job.id});
      show(job.id);
    } catch (fault) {
      place.replaceChildren(make("p.fault", {}, fault.message));
      if (fault.option) goTo(draft, fault.option, fault.message);
    }
  };
  if (draft.state.signal) show(draft.state.signal);
  return make("section.card", {}, make("h3", {}, "Is there anything to learn from?"),
    make("p.help", {}, "The model answers a few prompts several times. Where all answers to a prompt score alike, nothing can be learnt from it. "
      + "This loads the model and takes a minute or more."),
    make("div.buttons", {}, make("button", {type: "button", id: "ask-signal", onclick: go}, "Check the signal")), place);
}
