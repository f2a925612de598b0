// The run that is being put together: what was entered (kept for the tab), and what the studio says of it.

import {nameFault} from "./next_thing.js";
import {fresh, guided, proposed, same} from "./run_settings.js";
import {get, post} from "./server.js";

const KEY = "hybrid_rlhf_new_run_1"; // the number changes with the shape of what is kept
const WAIT = 400; // milliseconds after the last key, before the studio is asked

// Events: state (something was entered), loading, stage or trouble (another method's options), answer (the settings were
// looked at), look (a source of data was), jobs (the queue), reveal (a search is to hide nothing).
export class Draft {
  constructor(goals, runs, uploads) {
    Object.assign(this, {goals, runs, uploads, options: [], stageHelp: "", looks: {}, answer: null, jobs: [],
      trouble: "", isClosed: false});
    this.state = {...fresh(), ...kept()};
    this.state.card ||= goals.card;
    this.fields = new Map(); // option -> [what shows it]: see field_frame.js
    this.unread = new Map(); // option -> what is wrong with what was entered, so that it cannot be sent
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

  on(name, handle) {
    this.bus.addEventListener(name, handle);
  }

  // Until the stage changes.
  onStage(names, handle) {
    for (const name of names) this.bus.addEventListener(name, handle, {signal: this.life.signal});
  }

  emit(name) {
    this.bus.dispatchEvent(new Event(name));
  }

  update(patch) {
    // what a card or a start makes of the options is asked anew; until then whatever is chosen is one's own choice
    if (["card", "isNew", "isSplit"].some((name) => name in patch && patch[name] !== this.state[name])) this.bases.clear();
    Object.assign(this.state, patch);
    this.keep();
    this.emit("state");
    this.ask();
  }

  keep() {
    if (this.isClosed) return;
    try {
      sessionStorage.setItem(KEY, JSON.stringify(this.state));
    } catch {
      // A browser that keeps nothing: all else works.
    }
  }

  forget() {
    this.close();
    sessionStorage.removeItem(KEY);
  }

  // Take another goal's stage: its options are other ones. Those set by hand stay where the stage has them.
  async takeStage(stage) {
    this.update({stage});
    await this.loadOptions();
  }

  async loadOptions() {
    const {stage} = this.state;
    if (!stage) return;
    Object.assign(this, {options: [], trouble: ""});
    this.emit("loading");
    let found;
    try {
      found = await patient(() => get("options", {stage}), () => stage === this.state.stage);
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
    Object.assign(this, {options: found.options, stageHelp: found.help, answer: null});
    this.emit("stage");
    for (const [name, fields] of this.fields) this.fields.set(name, fields.filter((field) => field.node.isConnected));
    this.ask();
  }

  guided() {
    return guided(this.state, this.asks, this.runs);
  }

  // What is sent: the steps' answers, and what was set by hand of the options that this stage has.
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

  value(option) {
    const {settings} = this.state;
    if (option.name in settings) return settings[option.name];
    const found = this.answer?.settings ?? {};
    return option.name in found ? found[option.name] : option.default;
  }

  isOwn(name) {
    return name in this.state.settings;
  }

  // Its value without what was set by hand: the default, or what the card or the goal makes of it.
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

  ask() {
    clearTimeout(this.timer);
    this.timer = this.state.stage && this.options.length ? setTimeout(() => this.request(), WAIT) : null;
  }

  request() {
    if (this.isClosed) return;
    clearTimeout(this.timer);
    this.timer = null;
    const mine = ++this.turn;
    const {stage, card} = this.state;
    const asked = {stage, settings: this.settings(), card: card || null, run: this.runName()};
    const answer = patient(() => post("settings", asked), () => mine === this.turn);
    this.pending = answer.catch((fault) => this.unanswered(fault)).then((found) => {
      if (mine === this.turn && !this.isClosed) this.take(found);
    });
  }

  unanswered(fault) {
    const isGone = fault instanceof TypeError; // fetch found nobody
    const text = isGone ? "the studio does not answer; is it still running?" : fault.message;
    return {...this.answer, isLost: true, error: {option: fault.option ?? null, text}};
  }

  take(answer) {
    this.answer = answer;
    const found = answer.settings ?? {};
    for (const option of this.options) {
      const value = option.name in found ? found[option.name] : option.default;
      if (!this.isOwn(option.name)) this.bases.set(option.name, value);
    }
    this.emit("answer");
  }

  // The name of the run, where it can be one.
  runName() {
    return nameFault(this) ? null : this.state.run.trim();
  }

  // What a run of these settings is started with: those of the card among them.
  given() {
    return this.answer.given ?? this.answer.settings ?? {};
  }

  // Look at a source of data, after those that are being looked at: of a kind only the newest question is answered.
  lookAt(asked) {
    const look = () => patient(() => post("data", asked), () => !this.isClosed);
    this.looking = this.looking.then(look, look);
    return this.looking;
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

  close() {
    clearTimeout(this.timer);
    this.isClosed = true;
    this.turn = -1;
  }
}

// An answer, asked for again where a question from another tab took its place, as long as it is wanted.
export async function patient(ask, isWanted = () => true) {
  for (let i = 0; ; i++) {
    try {
      return await ask();
    } catch (fault) {
      if (fault.status !== 409 || fault.message !== "replaced" || i > 20 || !isWanted()) throw fault;
      await new Promise((done) => setTimeout(done, 200 + 300 * Math.random()));
    }
  }
}

// What was kept, as far as it has the shape of today's pages.
function kept() {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEY)) ?? {};
    const shape = fresh();
    return Object.fromEntries(Object.entries(found).filter(([name, value]) =>
      name in shape && (shape[name] === null || typeof shape[name] === typeof value)));
  } catch {
    return {};
  }
}
