// What is to be done next: the first thing that is missing, wrong or refused, and where it is.

import {goTo} from "./field_frame.js";
import {dataKeys} from "./run_settings.js";

const FIRST = "Choose what the model is to learn from. The rest follows from that.";
const LOADING = "Loading the options … The first time takes up to half a minute.";
const READY = "Everything is there. Look at the rows and count the memory (step “Before you start”), or start.";
const NAME = /^[A-Za-z0-9_][A-Za-z0-9._-]*(\/[A-Za-z0-9_][A-Za-z0-9._-]*)*$/;

// {text, go() where something stands in the way, isMissing: a step has no answer yet}. isStart: the name counts too.
export function nextOf(draft, isStart = true) {
  if (!draft.goal) return {text: FIRST, isMissing: true};
  if (!draft.options.length) return {text: draft.trouble ? "The options cannot be loaded." : LOADING, isMissing: true};
  const missing = missingStep(draft);
  if (missing) return {text: missing.text, go: () => goTo(draft, missing.option), isMissing: true};
  const wrong = wrongData(draft) ?? wrongSettings(draft);
  if (wrong) return wrong;
  if (isLooking(draft) || !draft.answer) return {text: "Looking at what you gave …"};
  const fault = isStart ? nameFault(draft) : null;
  return fault ? {text: fault, go: () => goTo(draft, "run", fault)} : {text: READY};
}

const optionOf = (key) => (key === "data" ? "data.sources" : `data.sources.${key}`);

// The sources that the data step gives: none where they are set by hand.
const keysOf = (draft) => (draft.isOwn("data.sources") ? [] : dataKeys(draft.state).map(([key]) => key));

const isLooking = (draft) => keysOf(draft).some((key) => !draft.looks[key]);

function wrongData(draft) {
  const key = keysOf(draft).find((each) => draft.looks[each] && !draft.looks[each].fits);
  if (!key) return null;
  const text = draft.looks[key].isRead ? "The data do not fit the goal." : "The data cannot be read.";
  return {text, go: () => goTo(draft, optionOf(key))};
}

function wrongSettings(draft) {
  const [unread] = draft.unread;
  if (unread) return {text: `${unread[0]} cannot be read.`, go: () => goTo(draft, unread[0], unread[1])};
  const error = draft.answer?.error;
  if (!error) return null;
  const go = () => goTo(draft, error.option, error.text) || draft.tellGeneral(error.text);
  return {text: `Refused: ${error.text}`, go};
}

function missingStep(draft) {
  const {state} = draft;
  if (!state.isNew && !state.model.trim() && !draft.isOwn("model.model_name_or_path")) {
    return {option: "model.model_name_or_path", text: "Next: name the model to start from."};
  }
  const empty = keysOf(draft).find((key) => !state.data[key].path.trim());
  if (empty) return {option: optionOf(empty), text: "Next: give the data."};
  return draft.asks.map((each) => MISSING[each]?.(state)).find(Boolean) ?? null;
}

// What a goal asks beside model and data -> what is missing there.
const MISSING = {
  reward_functions: (state) => {
    const hasOwn = state.hasTools && state.environment.trim();
    if (hasOwn || state.functions.length || state.ownFunctions.trim()) return null;
    return {option: "reward.functions", text: "Next: say what a good answer is, by a function."};
  },
  reward_model: (state) => {
    if (state.rewardModel.trim()) return null;
    const option = state.rewardKind === "ours" ? "roles.reward.model_name_or_path" : "reward.models";
    return {option, text: "Next: name the reward model."};
  },
  judge: ({judge}) => {
    if (!judge[judge.where].trim()) return {option: `reward.judge.${judge.where}`, text: "Next: say who judges."};
    if (judge.rubric !== "own" || judge.items.some((item) => item.question.trim())) return null;
    return {option: "reward.judge.rubric", text: "Next: write a question for the judge."};
  },
  teacher: (state) => {
    if (state.teacher.trim()) return null;
    return {option: "roles.teacher.model_name_or_path", text: "Next: name the teacher."};
  },
};

// What is wrong with the name of the run, in one line; null where it can be taken.
export function nameFault(draft) {
  const run = draft.state.run.trim();
  if (!run) return "Give the run a name.";
  if (!NAME.test(run)) {
    return "A name has letters, digits, dots, - and _, and does not begin with a dot or -; / makes a folder.";
  }
  return isTaken(draft, run) ? `There is a run ${run} already; take another name.` : null;
}

function isTaken(draft, run) {
  const isWaiting = (job) => job.kind === "train" && job.run === run && ["queued", "running"].includes(job.state);
  return draft.runs.rows.some((row) => row.id === run) || draft.jobs.some(isWaiting);
}

// A free name, of the data's and the method's.
export function suggestedName(draft) {
  const [[key]] = dataKeys(draft.state);
  const file = draft.state.data[key].path.trim().split("/").at(-1).replace(/\.[a-z.]+$/, "");
  const words = file.replaceAll(/[^A-Za-z0-9_-]+/g, "-").replace(/^-+|-+$/g, "");
  const stem = [words, draft.state.stage].filter(Boolean).join("-");
  let name = stem;
  for (let n = 2; isTaken(draft, name); n++) name = `${stem}-${n}`;
  return name;
}
