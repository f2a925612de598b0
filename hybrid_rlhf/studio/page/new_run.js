// A new run: from what it is to learn to its start, in the order in which one decides. The settings grow beside the steps.

import {make, tell} from "./dom.js";
import {get} from "./server.js";
import {checksStep} from "./checks_step.js";
import {dataStep} from "./data_step.js";
import {goalStep} from "./goal_step.js";
import {modelStep} from "./model_step.js";
import {optionsStep} from "./options_step.js";
import {rewardStep, rewardTitle} from "./reward_step.js";
import {Draft} from "./run_draft.js";
import {fresh} from "./run_settings.js";
import {refuse, runPanel} from "./run_panel.js";

export async function show(root, _rest, query) {
  root.append(make("p.quiet", {}, "Loading …"));
  const [goals, runs, uploads] = await Promise.all([get("goals"), orNone(get("runs"), "Runs"), orNone(get("uploads"), "Uploaded files")])
    .finally(() => root.replaceChildren());
  const draft = new Draft(goals, {folder: runs.folder ?? "", rows: runs.runs ?? []}, uploads.files ?? []);
  prefill(draft, query);
  const leaving = [() => draft.close(), keepFilesOut()];
  const later = make("div");
  draft.on("loading", () => later.replaceChildren(make("p.quiet", {}, "Loading the options …")));
  draft.on("trouble", () => later.replaceChildren(make("p.fault", {role: "alert"}, `The options cannot be loaded: ${draft.trouble}. `,
    make("button", {type: "button", onclick: () => draft.loadOptions()}, "Try again"))));
  draft.on("stage", () => later.replaceChildren(...steps(draft, leaving)));
  root.append(make("div.new-run", {}, make("div.new-steps", {},
      make("h1", {}, "New run"),
      make("p.quiet", {}, "A few questions, and a model trains on this machine. Nothing starts before you say so."),
      make("p.offers", {}, make("button.quiet-button", {type: "button", id: "try-out", onclick: () => tryOut(draft)}, "Fill this in with an example"),
        " (a tiny model and built-in data, a few minutes), or ",
        make("button.quiet-button", {type: "button", id: "start-over", onclick: () => startOver(draft)}, "start over"), "."),
      step(1, "What should the model learn from?", goalStep(draft)), later), runPanel(draft, leaving)));
  if (draft.goal) {
    if (!draft.goal.stages.includes(draft.state.stage)) draft.update({stage: draft.goal.stages[0]});
    await draft.loadOptions();
  }
  return () => leaving.forEach((leave) => leave());
}

// A file that is dropped beside its place does not replace the page.
function keepFilesOut() {
  const life = new AbortController();
  for (const name of ["dragover", "drop"]) addEventListener(name, (event) => event.preventDefault(), {signal: life.signal});
  return () => life.abort();
}

// The page works without what another part of the studio would add; that it is missing is said.
async function orNone(answer, what) {
  try {
    return await answer;
  } catch (fault) {
    tell(`${what} cannot be listed: ${fault.message}`, true);
    return {};
  }
}

// ?goal=&model=&data=; then the address is a plain one, so that a reload keeps what was changed since.
function prefill(draft, query) {
  const wanted = query.get("goal");
  const goal = draft.goals.goals.find((each) => each.id === wanted || each.stages.includes(wanted));
  if (goal) draft.update({goal: goal.id, stage: goal.stages.includes(wanted) ? wanted : goal.stages[0]});
  if (query.get("model")) draft.update({model: query.get("model"), isNew: false});
  if (query.get("data")) {
    draft.update({isSplit: false, data: {...draft.state.data, data: {path: query.get("data"), name: "", split: "", columns: ""}}});
  }
  if ([...query.keys()].length) history.replaceState(null, "", "#/new");
}

function startOver(draft) {
  if (draft.goal && !confirm("Forget everything that was entered on this page?")) return;
  draft.forget();
  dispatchEvent(new HashChangeEvent("hashchange"));
}

// An example that needs nothing from elsewhere.
function tryOut(draft) {
  if (draft.goal && !confirm("Replace everything that was entered on this page?")) return;
  const state = {...fresh(), card: draft.goals.card, goal: "imitate", stage: "sft", isNew: true, settings: {"train.num_train_epochs": 1}};
  state.data.data.path = "demo/demonstrations";
  draft.update(state);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

function steps(draft, leaving) {
  const reward = rewardTitle(draft);
  const all = [["Which model?", modelStep(draft)], ["Which data?", dataStep(draft)],
    ...(reward ? [[reward, rewardStep(draft)]] : []), ["How should it train?", optionsStep(draft)],
    ["Before you start", checksStep(draft, () => refuse(draft, false), leaving)]];
  return all.map(([title, inside], i) => step(i + 2, title, inside));
}

function step(number, title, inside) {
  const id = `step-${number}`;
  return make("section.new-step", {"aria-labelledby": id}, make("h2", {id}, make("span.step-number", {}, `${number}.`), ` ${title}`), inside);
}
