// The run that is being put together: what was entered (kept for the tab), the studio's answers to it, and what comes
// next.

import {goTo} from "./fields.js";
import {freeName} from "./format.js";
import {isOpen} from "./jobs.js";
import {get, post} from "./server.js";
import {dataKeys, fresh, guided, proposed, same} from "./settings.js";

const KEY = "hybrid_rlhf_new_run_2"; // the number changes with the shape of what is kept
const WAIT = 400; // milliseconds after the last key, before the studio is asked

// Events: state (something was entered), loading, stage or trouble (another method's options), answer (the studio's, to
// the settings), look (at a source of data), jobs (the queue), reveal (a search is to hide nothing).
export class Draft {
  constructor(goals, runs, uploads) {
    Object.assign(this, {goals, runs, uploads, options: [], stageHelp: "", looks: {}, answer: null, jobs: [],
      trouble: "", isClosed: false});
    this.state = {...fresh(), ...JSON.parse(sessionStorage.getItem(KEY))};
    this.state.card ||= goals.card;
    this.fields = new Map(); // option -> [its fields]: see fields.js
    this.unread = new Map(); // option -> why what was entered cannot be sent
    this.bases = new Map(); // option -> its value without what was set by hand
    this.bus = new EventTarget();
    this.life = new AbortController(); // of what follows the options of one stage
    this.turn = 0;
    this.timer = null;
    this.pending = Promise.resolve();
    this.looking = Promise.resolve(); // the last look at a source of data: one at a time
  }

  get goal() {
    return this.goals.goals.find((goal) => goal.id === this.state.goal) ?? null;
  }

  get asks() {
    return this.goal?.asks ?? [];
  }

  on(names, handle) {
    for (const name of names.split(" ")) this.bus.addEventListener(name, handle);
  }

  // Call show() now and at these events, until the stage changes.
  follow(names, show) {
    for (const name of names.split(" ")) this.bus.addEventListener(name, show, {signal: this.life.signal});
    show();
  }

  emit(name) {
    this.bus.dispatchEvent(new Event(name));
  }

  update(patch) {
    // the card, and whether model and data are new or split, change other options' values: these are asked for anew
    const isOther = (name) => name in patch && patch[name] !== this.state[name];
    if (["card", "isNew", "isSplit"].some(isOther)) this.bases.clear();
    Object.assign(this.state, patch);
    if (!this.isClosed) sessionStorage.setItem(KEY, JSON.stringify(this.state));
    this.emit("state");
    this.ask();
  }

  forget() {
    this.close();
    sessionStorage.removeItem(KEY);
  }

  close() {
    clearTimeout(this.timer);
    this.isClosed = true;
    this.turn = -1;
  }

  // Load the options of the stage. Those set by hand stay where the stage has them.
  async loadOptions() {
    const {stage} = this.state;
    if (!stage) return;
    Object.assign(this, {options: [], trouble: ""});
    this.emit("loading");
    let loaded;
    try {
      loaded = await get("options", {stage});
    } catch (fault) {
      if (stage !== this.state.stage) return;
      this.trouble = fault.message;
      this.emit("trouble");
      return;
    }
    if (stage !== this.state.stage || this.isClosed) return;
    this.life.abort();
    this.life = new AbortController();
    this.bases.clear();
    this.unread.clear();
    Object.assign(this, {options: loaded.options, stageHelp: loaded.help, answer: null});
    this.emit("stage");
    for (const [name, fields] of this.fields) this.fields.set(name, fields.filter((field) => field.node.isConnected));
    this.ask();
  }

  // ---- options

  guided() {
    return guided(this.state, this.asks, this.runs);
  }

  // The settings to send: the steps' answers, and what was set by hand of the options that this stage has.
  settings() {
    const known = new Set(this.options.map((option) => option.name));
    const soft = Object.entries({...proposed(this.state), ...this.state.settings}).filter(([name]) => known.has(name));
    return {...Object.fromEntries(soft), ...this.guided()};
  }

  // Options set by hand that this stage does not have.
  leftOut() {
    const known = new Set(this.options.map((option) => option.name));
    return Object.keys(this.state.settings).filter((name) => !known.has(name));
  }

  // The value of an option in the studio's last answer.
  answered({name, default: usual}) {
    const settings = this.answer?.settings ?? {};
    return name in settings ? settings[name] : usual;
  }

  value(option) {
    return this.isOwn(option.name) ? this.state.settings[option.name] : this.answered(option);
  }

  // Whether an option was set by hand.
  isOwn(name) {
    return name in this.state.settings;
  }

  // An option's value without what was set by hand: the default, or what the card or the goal makes of it.
  base(option) {
    return this.bases.has(option.name) ? this.bases.get(option.name) : option.default;
  }

  setOption(option, value) {
    const {[option.name]: _, ...rest} = this.state.settings;
    const isBase = this.bases.has(option.name) && same(value, this.base(option));
    this.update({settings: isBase ? rest : {...rest, [option.name]: value}});
  }

  dropOption(name) {
    const {[name]: _, ...rest} = this.state.settings;
    this.unread.delete(name);
    this.update({settings: rest});
  }

  // ---- the studio's answer

  ask() {
    clearTimeout(this.timer);
    this.timer = this.state.stage && this.options.length ? setTimeout(() => this.request(), WAIT) : null;
  }

  request() {
    if (this.isClosed) return;
    clearTimeout(this.timer);
    this.timer = null;
    const turn = ++this.turn, {stage, card} = this.state;
    const body = {stage, settings: this.settings(), card: card || null, run: this.runName()};
    const lost = ({message, option}) =>
      ({...this.answer, isLost: true, error: {option: option ?? null, text: message}});
    this.pending = this.pending.then(async () => { // one at a time, and none that a newer one has overtaken
      if (turn !== this.turn) return;
      const answer = await post("settings", body).catch(lost);
      if (turn !== this.turn) return;
      this.answer = answer;
      for (const option of this.options) {
        if (!this.isOwn(option.name)) this.bases.set(option.name, this.answered(option));
      }
      this.emit("answer");
    });
  }

  // The studio's answer to what is entered now.
  async settled() {
    if (this.timer || !this.answer || this.answer.isLost) this.request();
    for (let seen = null; seen !== this.pending;) {
      seen = this.pending;
      await seen;
    }
    return this.answer;
  }

  // The name of the run, where it can be one.
  runName() {
    return nameFault(this) ? null : this.state.run.trim();
  }

  // The settings that a run is started with: those of the card among them.
  given() {
    return this.answer.given ?? this.answer.settings ?? {};
  }

  // Look at a source of data, after earlier looks.
  lookAt(body) {
    const look = () => post("data", body);
    this.looking = this.looking.then(look, look);
    return this.looking;
  }
}

// ---- the next thing to do: the first thing that is missing, wrong or refused, and where it is

const FIRST = "Choose what the model is to learn from. The rest follows from that.";
const LOADING = "Loading the options … The first time takes up to half a minute.";
const READY = "Everything is there. Look at the rows and count the memory (step “Before you start”), or start.";
const NAME = /^[A-Za-z0-9_][A-Za-z0-9._-]*(\/[A-Za-z0-9_][A-Za-z0-9._-]*)*$/;

// {text, go() where something stands in the way, isMissing: a step has no answer yet}. isStart: the name counts too.
export function nextOf(draft, isStart = true) {
  if (!draft.goal) return {text: FIRST, isMissing: true};
  if (!draft.options.length) return {text: draft.trouble ? "The options cannot be loaded." : LOADING, isMissing: true};
  const missing = missingStep(draft);
  if (missing) return {text: missing[1], go: () => goTo(draft, missing[0]), isMissing: true};
  const wrong = wrongData(draft) ?? wrongSettings(draft);
  if (wrong) return wrong;
  const isLooking = keysOf(draft).some((key) => !draft.looks[key]);
  if (isLooking || !draft.answer) return {text: "Looking at what you gave …"};
  const fault = isStart ? nameFault(draft) : null;
  return fault ? {text: fault, go: () => goTo(draft, "run", fault)} : {text: READY};
}

export const sourceOption = (key) => (key === "data" ? "data.sources" : `data.sources.${key}`);

// The sources that the data step gives: none where they are set by hand.
const keysOf = (draft) => (draft.isOwn("data.sources") ? [] : dataKeys(draft.state).map(([key]) => key));

function wrongData(draft) {
  const key = keysOf(draft).find((name) => draft.looks[name] && !draft.looks[name].fits);
  if (!key) return null;
  const text = draft.looks[key].isRead ? "The data do not fit the goal." : "The data cannot be read.";
  return {text, go: () => goTo(draft, sourceOption(key))};
}

function wrongSettings(draft) {
  const [unread] = draft.unread;
  if (unread) return {text: `${unread[0]} cannot be read.`, go: () => goTo(draft, unread[0], unread[1])};
  const error = draft.answer?.error;
  if (!error) return null;
  const go = () => goTo(draft, error.option, error.text) || draft.showFault(error.text);
  return {text: `Refused: ${error.text}`, go};
}

// [the option to enter, what to do]
function missingStep(draft) {
  const {state} = draft;
  if (!state.isNew && !state.model.trim() && !draft.isOwn("model.model_name_or_path")) {
    return ["model.model_name_or_path", "Next: name the model to start from."];
  }
  const empty = keysOf(draft).find((key) => !state.data[key].path.trim());
  if (empty) return [sourceOption(empty), "Next: give the data."];
  return draft.asks.map((asked) => MISSING[asked]?.(state)).find(Boolean) ?? null;
}

// What a goal asks for beside model and data -> what is missing there.
const MISSING = {
  reward_functions: (state) => {
    const hasReward = state.functions.length || state.ownFunctions.trim() || state.hasTools && state.environment.trim();
    return hasReward ? null : ["reward.functions", "Next: say what a good answer is, by a function."];
  },
  reward_model: (state) => {
    const option = state.rewardKind === "ours" ? "roles.reward.model_name_or_path" : "reward.models";
    return state.rewardModel.trim() ? null : [option, "Next: name the reward model."];
  },
  judge: ({judge}) => {
    if (!judge[judge.where].trim()) return [`reward.judge.${judge.where}`, "Next: say who judges."];
    if (judge.rubric !== "own" || judge.items.some((item) => item.question.trim())) return null;
    return ["reward.judge.rubric", "Next: write a question for the judge."];
  },
  teacher: (state) =>
    state.teacher.trim() ? null : ["roles.teacher.model_name_or_path", "Next: name the teacher."],
};

// Why the name of the run cannot be taken, in one line; null where it can.
export function nameFault(draft) {
  const run = draft.state.run.trim();
  if (!run) return "Give the run a name.";
  if (!NAME.test(run)) {
    return "A name has letters, digits, dots, - and _, and does not begin with a dot or -; / makes a folder.";
  }
  return isTaken(draft, run) ? `There is a run ${run} already; take another name.` : null;
}

function isTaken(draft, run) {
  return draft.runs.rows.some((row) => row.id === run)
    || draft.jobs.some((job) => job.kind === "train" && job.run === run && isOpen(job));
}

// A free name, of the data's and the method's.
export function suggestedName(draft) {
  const [[key]] = dataKeys(draft.state);
  const file = draft.state.data[key].path.trim().split("/").at(-1).replace(/\.[a-z.]+$/, "");
  const words = file.replaceAll(/[^A-Za-z0-9_-]+/g, "-").replace(/^-+|-+$/g, "");
  return freeName([words, draft.state.stage].filter(Boolean).join("-"), (name) => isTaken(draft, name));
}
