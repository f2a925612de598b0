// A new run: from what it is to learn to its start, in the order in which one decides. Its settings grow beside that.

import {checksStep} from "./checks_step.js";
import {dataStep} from "./data_step.js";
import {make, tell} from "./dom.js";
import {button, inline} from "./field_frame.js";
import {goalStep} from "./goal_step.js";
import {modelStep} from "./model_step.js";
import {optionsStep} from "./options_step.js";
import {rewardStep, rewardTitle} from "./reward_step.js";
import {Draft} from "./run_draft.js";
import {refuse, runPanel} from "./run_panel.js";
import {fresh} from "./run_settings.js";
import {get} from "./server.js";

export async function show(root, _rest, query) {
  root.append(make("p.quiet", {}, "Loading …"));
  const asked = [get("goals"), orNone(get("runs"), "Runs"), orNone(get("uploads"), "Uploaded files")];
  const [goals, runs, uploads] = await Promise.all(asked).finally(() => root.replaceChildren());
  const draft = new Draft(goals, {folder: runs.folder ?? "", rows: runs.runs ?? []}, uploads.files ?? []);
  prefill(draft, query);
  const leaving = [() => draft.close(), keepFilesOut()];
  root.append(make("div.new-run", {},
    make("div.new-steps", {}, ...heading(draft), step(1, "What should the model learn from?", goalStep(draft)),
      laterSteps(draft, leaving)),
    runPanel(draft, leaving)));
  if (draft.goal) {
    if (!draft.goal.stages.includes(draft.state.stage)) draft.update({stage: draft.goal.stages[0]});
    await draft.loadOptions();
  }
  return () => leaving.forEach((leave) => leave());
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

// ?goal=&stage=&model=&data=; then the address is a plain one, so that a reload keeps what was changed since.
function prefill(draft, query) {
  const [wanted, stage, model, path] = ["goal", "stage", "model", "data"].map((name) => query.get(name));
  const goal = draft.goals.goals.find((each) => each.id === wanted || each.stages.includes(wanted));
  if (goal) draft.update({goal: goal.id, stage: [stage, wanted].find((name) => goal.stages.includes(name)) ?? goal.stages[0]});
  if (model) draft.update({model, isNew: false});
  if (path) draft.update({isSplit: false, data: {...draft.state.data, data: {...fresh().data.data, path}}});
  if ([...query.keys()].length) history.replaceState(null, "", "#/new");
}

// A file that is dropped beside its place does not replace the page.
function keepFilesOut() {
  const life = new AbortController();
  for (const name of ["dragover", "drop"]) {
    addEventListener(name, (event) => event.preventDefault(), {signal: life.signal});
  }
  return () => life.abort();
}

function heading(draft) {
  return [make("h1", {}, "New run"),
    make("p.quiet", {}, "A few questions, and a model trains on this machine. Nothing starts before you say so."),
    make("p.offers", {}, inline("Fill this in with an example", () => tryOut(draft), {id: "try-out"}),
      " (a tiny model and built-in data, a few minutes), or ",
      inline("start over", () => startOver(draft), {id: "start-over"}), ".")];
}

function startOver(draft) {
  if (draft.goal && !confirm("Forget everything that was entered on this page?")) return;
  draft.forget();
  dispatchEvent(new HashChangeEvent("hashchange"));
}

// An example that needs nothing from elsewhere.
function tryOut(draft) {
  if (draft.goal && !confirm("Replace everything that was entered on this page?")) return;
  const state = {...fresh(), card: draft.goals.card, goal: "imitate", stage: "sft", isNew: true,
    settings: {"train.num_train_epochs": 1}};
  state.data.data.path = "demo/demonstrations";
  draft.update(state);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

// The steps that go by the goal, made again whenever it or its method changes.
function laterSteps(draft, leaving) {
  const place = make("div");
  const tellTrouble = () => make("p.fault", {role: "alert"}, `The options cannot be loaded: ${draft.trouble}. `,
    button("Try again", () => draft.loadOptions()));
  draft.on("loading", () => place.replaceChildren(make("p.quiet", {}, "Loading the options …")));
  draft.on("trouble", () => place.replaceChildren(tellTrouble()));
  draft.on("stage", () => place.replaceChildren(...steps(draft, leaving)));
  return place;
}

function steps(draft, leaving) {
  const reward = rewardTitle(draft);
  const all = [
    ["Which model?", modelStep(draft)],
    ["Which data?", dataStep(draft)],
    ...(reward ? [[reward, rewardStep(draft)]] : []),
    ["How should it train?", optionsStep(draft)],
    ["Before you start", checksStep(draft, () => refuse(draft, false), leaving)]];
  return all.map(([title, inside], i) => step(i + 2, title, inside));
}

function step(number, title, inside) {
  const id = `step-${number}`;
  const name = make("h2", {id}, make("span.step-number", {}, `${number}.`), ` ${title}`);
  return make("section.new-step", {"aria-labelledby": id}, name, inside);
}
