// Checks before a run is started: the rows as the model reads them, the memory that it needs, and the signal.

import {all, bars, button, fold, list, make, table} from "./dom.js";
import {goTo, inline} from "./fields.js";
import {bytes, duration} from "./format.js";
import {isOpen, makeJob} from "./jobs.js";
import {written} from "./options.js";
import {picturesNode} from "./samples.js";
import {get, on, paced, post} from "./server.js";
import {same} from "./settings.js";

const REWARDS = ["reward_functions", "reward_model", "judge"];

// refuse(): whether something stands in the way, which is shown then. leaving: functions to call when the page is left.
export function checksStep(draft, refuse, leaving) {
  const body = (settings) => ({stage: draft.state.stage, card: draft.state.card, settings});
  const preview = check(draft, refuse, {
    name: "preview", title: "What will the model see?", press: "Show the rows",
    about: "Three rows as the model reads them, and how many rows are lost on the way.",
    ask: (settings) => post("preview", body(settings)), show: previewNodes});
  const plan = check(draft, refuse, {
    name: "plan", title: "Will it fit, and how long does it take?", press: "Count the memory",
    about: "Counted from the model's shape, before any of it is loaded.",
    ask: (settings) => post("plan", {...body(settings), memory: memoryOf(draft)}),
    show: (answer) => planNodes(answer, (name, value) => apply(draft, name, value))});
  const hasSignal = draft.asks.some((asked) => REWARDS.includes(asked));
  return make("div.checks", {}, preview, plan, hasSignal ? signalPart(draft, refuse, leaving) : null);
}

// Bytes of a card that was chosen in place of this machine's; null: the memory that is free here, or, without a card,
// that of the card that the settings are for.
function memoryOf(draft) {
  const {card} = draft.state;
  return draft.goals.card === "cpu" || card === draft.goals.card || card === "cpu" ? null : parseInt(card) * 2 ** 30;
}

function apply(draft, name, value) {
  const option = draft.options.find((known) => known.name === name);
  if (!option) return;
  draft.setOption(option, value);
  goTo(draft, name);
}

function check(draft, refuse, {name, title, about, press, ask, show}) {
  const result = make("div", {role: "status"});
  const old = make("p.notice", {hidden: true}, "The settings have changed since. Press the button again.");
  let asked = null, isBusy = false;
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
      result.replaceChildren(...show(await ask(asked)));
    } catch (fault) {
      asked = null;
      showFault(draft, fault, result);
    }
    isBusy = false;
    node.removeAttribute("aria-disabled");
  };
  const node = button(press, go, {id: `ask-${name}`});
  draft.follow("answer", () => (old.hidden = asked === null || same(asked, draft.given())));
  return part(title, about, node, old, result);
}

const part = (title, about, press, ...rest) => make("section.card", {}, make("h3", {}, title),
  make("p.help", {}, about), make("div.buttons", {}, press), ...rest);

function showFault(draft, fault, place) {
  place.replaceChildren(make("p.fault", {}, fault.message));
  if (fault.option) goTo(draft, fault.option, fault.message);
}

const listNotice = (title, lines, ...more) => make("div.notice", {}, make("p", {}, title), list(lines), ...more);

// ---- the rows; trained text stands in brackets, bold and underlined, so that colour alone does not mark it

const integer = (value) => value.toLocaleString("en");
const COUNTS = [{title: "Rows", cell: (row) => row.name},
  {title: "Count", isNumber: true, cell: (row) => integer(row.rows)}];

function previewNodes({counts, dropped, examples}) {
  const lost = dropped.filter((row) => row.rows).map(({why, rows}) => `${integer(rows)}: ${why}`);
  const isTrained = examples.some((row) => row.parts.some((text) => text.is_trained));
  const legend = isTrained ? ["The model learns to write what stands in ", make("strong.trained", {}, "brackets"),
    "; the rest it only reads."]
    : ["These are prompts: the model only reads them, and learns from the answers that it writes itself."];
  return [table(COUNTS, counts.filter((row, i) => row.rows || !i), "Counts of rows"),
    lost.length ? listNotice("Rows that will be lost:", lost) : make("p.help", {}, "No row is lost."),
    ...examples.length ? [make("p.help", {}, ...legend)] : [], ...examples.map(example)];
}

function example({title, parts, images}, i) {
  const texts = parts.map(({text, is_trained: isTrained}) => make(isTrained ? "strong.trained" : "span", {}, text));
  return make("figure.example", {}, make("figcaption", {}, title || `Example ${i + 1}`),
    picturesNode(images), make("div.said", {}, ...texts));
}

// ---- the plan: memory by phase beside what there is, seconds of a step, the verdict and its advice

const TIMES = [{title: "A step", cell: (row) => row.name},
  {title: "Time", isNumber: true, cell: (row) => duration(row.seconds)}];
const LINES = [{title: "What", cell: (line) => line.name},
  {title: "Memory", isNumber: true, cell: (line) => bytes(line.bytes)}];

// use(option, value): take a piece of advice.
function planNodes(plan, use) {
  const {fits, available, phases, lines, times, verdict, changes, plan_notes: notes} = plan;
  const inside = "What takes the memory";
  return [make(fits ? "p.verdict.good" : "p.verdict.fault", {}, fits ? "✓ " : "✗ ", verdict),
    changes.length ? changeList(changes, use) : null,
    notes.length ? listNotice("To know:", notes) : null,
    bars(phases.map(({name, bytes: size}) => ({name, value: size,
      text: `${bytes(size)}${available && size > available ? " (too much)" : ""}`})), "Memory by phase", available ?? 0),
    make("p.help", {},
      available ? `The line marks what there is: ${bytes(available)}.` : "How much there is, is not known."),
    times.length ? table(TIMES, times, "Predicted time of a step") : null,
    plan.time_note ? make("p.help", {}, `Time is ${plan.time_note.replace(/^time is /, "")}.`) : null,
    lines.length ? fold(inside, table(LINES, lines, inside)) : null].filter(Boolean);
}

function changeList(changes, use) {
  const isOne = changes.length === 1;
  const lines = changes.map(({option, value, why}) => [make("code", {}, `${option} ${written(value)}`),
    why ? `: ${why} ` : " ", inline("Use this", () => use(option, value))]);
  const useAll = () => changes.forEach(({option, value}) => use(option, value));
  return listNotice(isOne ? "With this it fits:" : "With all of these it fits:", lines,
    isOne ? null : button("Use all of them", useAll));
}

// ---- the signal: whether there is anything to learn from, as a job whose verdict is followed here

function signalPart(draft, refuse, leaving) {
  const place = make("div");
  let leave = null;
  leaving.push(() => leave?.());
  const show = (id) => {
    leave?.();
    leave = followSignal(id, place);
  };
  const go = async () => {
    await draft.settled();
    if (refuse()) return;
    try {
      const {id} = await post("jobs",
        {kind: "signal", stage: draft.state.stage, settings: draft.given(), run: draft.runName()});
      draft.update({signal: id});
      show(id);
    } catch (fault) {
      showFault(draft, fault, place);
    }
  };
  if (draft.state.signal) show(draft.state.signal);
  const about = "The model answers a few prompts several times. Where all answers to a prompt score alike, nothing can "
    + "be learnt from it. This loads the model and takes a minute or more.";
  return part("Is there anything to learn from?", about, button("Check the signal", go, {id: "ask-signal"}), place);
}

// Show the job `id` in `place` until the returned function is called.
function followSignal(id, place) {
  const verdicts = make("div", {role: "status"});
  const job = makeJob(id, "Output of the check", (text) => verdicts.replaceChildren(
    ...[...text.matchAll(/^verdict: (.*)$/gm)].map(([, line]) => make("p.verdict", {}, line))));
  const look = paced(async () => {
    const row = (await get("jobs")).jobs.find((other) => other.id === id);
    if (!row) return;
    job.update(row);
    if (!isOpen(row)) job.output.open = true; // its verdict is read from there
  });
  place.replaceChildren(make("p", {role: "status"}, "The check: ", job.state), job.error, verdicts, job.output,
    make("div.buttons", {}, job.stop));
  job.output.open = true;
  look();
  return all(on("jobs open", look), look.end, job.end);
}
