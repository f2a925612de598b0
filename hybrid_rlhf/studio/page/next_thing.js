// What is to be done next: the first thing that is missing, wrong or refused, and where it is.

import {goTo} from "./field_frame.js";
import {dataKeys} from "./run_settings.js";

// {text, go() where something stands in the way, isMissing: a step has no answer yet}. isStart: the name counts too.
export function nextOf(draft, isStart = true) {
  if (!draft.goal) return {text: "Choose what the model is to learn from. The rest follows from that.", isMissing: true};
  if (!draft.options.length) return {text: draft.trouble ? "The options cannot be loaded." : "Loading the options … The first time takes up to half a minute.", isMissing: true};
  const missing = missingStep(draft);
  if (missing) return {text: missing.text, go: () => goTo(draft, missing.option), isMissing: true};
  let isLooking = false;
  for (const [key] of dataKeys(draft.state)) {
    const look = draft.looks[key];
    isLooking ||= !look && !draft.isOwn("data.sources");
    if (look && !look.fits && !draft.isOwn("data.sources")) {
      return {text: look.isRefused ? "The data cannot be read." : "The data do not fit the goal.", go: () => goTo(draft, optionOf(key))};
    }
  }
  const [unread] = draft.unread;
  if (unread) return {text: `${unread[0]} cannot be read.`, go: () => goTo(draft, unread[0], unread[1])};
  const error = draft.answer?.error;
  if (error) return {text: `Refused: ${error.text}`, go: () => goTo(draft, error.option, error.text) || toGeneral(draft, error.text)};
  if (isLooking || !draft.answer) return {text: "Looking at what you gave …"};
  const fault = isStart ? nameFault(draft) : null;
  if (fault) return {text: fault, go: () => goTo(draft, "run", fault)};
  return {text: "Everything is there. Look at the rows and count the memory (step “Before you start”), or start."};
}

function toGeneral(draft, text) {
  Object.assign(draft.generalFault, {hidden: false, textContent: text});
  draft.generalFault.focus();
  return true;
}

const optionOf = (key) => (key === "data" ? "data.sources" : `data.sources.${key}`);

function missingStep(draft) {
  const {state, asks} = draft;
  const lacks = (option, text) => ({option, text});
  if (!state.isNew && !state.model.trim() && !draft.isOwn("model.model_name_or_path")) {
    return lacks("model.model_name_or_path", "Next: name the model to start from.");
  }
  const empty = dataKeys(state).find(([key]) => !state.data[key].path.trim());
  if (empty && !draft.isOwn("data.sources")) return lacks(optionOf(empty[0]), "Next: give the data.");
  const hasOwnReward = state.hasTools && state.environment.trim();
  if (asks.includes("reward_functions") && !state.functions.length && !state.ownFunctions.trim() && !hasOwnReward) {
    return lacks("reward.functions", "Next: say what a good answer is, by a function.");
  }
  if (asks.includes("reward_model") && !state.rewardModel.trim()) {
    return lacks(state.rewardKind === "ours" ? "roles.reward.model_name_or_path" : "reward.models", "Next: name the reward model.");
  }
  const {judge} = state;
  if (asks.includes("judge") && !judge[judge.where].trim()) return lacks(`reward.judge.${judge.where}`, "Next: say who judges.");
  if (asks.includes("judge") && judge.rubric === "own" && !judge.items.some((item) => item.question.trim())) {
    return lacks("reward.judge.rubric", "Next: write a question for the judge.");
  }
  return asks.includes("teacher") && !state.teacher.trim() ? lacks("roles.teacher.model_name_or_path", "Next: name the teacher.") : null;
}

// What is wrong with the name of the run, in one line; null where it can be taken.
export function nameFault(draft) {
  const run = draft.state.run.trim();
  if (!run) return "Give the run a name.";
  if (!/^[A-Za-z0-9_][A-Za-z0-9._-]*(\/[A-Za-z0-9_][A-Za-z0-9._-]*)*$/.test(run)) {
    return "A name has letters, digits, dots, - and _, and does not begin with a dot or -; / makes a folder.";
  }
  return isTaken(draft, run) ? `There is a run ${run} already; take another name.` : null;
}

function isTaken(draft, run) {
  const isWaiting = (job) => job.kind === "train" && job.run === run && (job.state === "queued" || job.state === "running");
  return draft.runs.rows.some((row) => row.id === run) || draft.jobs.some(isWaiting);
}

// A free name from the data's and the method's.
export function suggestedName(draft) {
  const [[key]] = dataKeys(draft.state);
  const file = draft.state.data[key].path.trim().split("/").at(-1).replace(/\.[a-z.]+$/, "");
  const stem = [file.replaceAll(/[^A-Za-z0-9_-]+/g, "-").replace(/^-+|-+$/g, ""), draft.state.stage].filter(Boolean).join("-");
  let name = stem;
  for (let n = 2; isTaken(draft, name); n++) name = `${stem}-${n}`;
  return name;
}
