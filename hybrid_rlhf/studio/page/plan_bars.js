// What a run needs: memory by phase beside what there is, seconds of a step, the verdict and its advice.

import {make, table} from "./dom.js";
import {button, inline} from "./field_frame.js";
import {bytes, duration} from "./format.js";
import {written} from "./option_fields.js";

const TIMES = [{title: "A step", cell: (row) => row.name},
  {title: "Time", isNumber: true, cell: (row) => duration(row.seconds)}];
const LINES = [{title: "What", cell: (line) => line.name},
  {title: "Memory", isNumber: true, cell: (line) => bytes(line.bytes)}];

// apply(option, value): take a piece of advice.
export function planBars(plan, apply) {
  const {fits, available, phases, lines, times, verdict, advice, changes = [], plan_notes: notes = []} = plan;
  const parts = [make(fits ? "p.verdict.good" : "p.verdict.fault", {}, fits ? "✓ " : "✗ ", verdict)];
  if (changes.length) parts.push(changeList(changes, apply));
  else if (advice.length) parts.push(notice("What would help:", advice));
  if (notes.length) parts.push(notice("To know:", notes));
  parts.push(bars(phases, available));
  if (times.length) parts.push(table(TIMES, times, "Predicted time of a step"));
  if (plan.time_note) parts.push(make("p.help", {}, `Time is ${plan.time_note.replace(/^time is /, "")}.`));
  const summary = make("summary", {}, "What takes the memory");
  if (lines.length) parts.push(make("details", {}, summary, table(LINES, lines, "What takes the memory")));
  return parts;
}

function bars(phases, available) {
  const most = Math.max(available ?? 0, ...phases.map((phase) => phase.bytes), 1);
  const told = available ? `The line marks what there is: ${bytes(available)}.` : "How much there is, is not known.";
  return make("div", {}, make("div.plan-bars", {}, ...phases.map((phase) => bar(phase, most, available))),
    make("p.help", {}, told));
}

function bar(phase, most, available) {
  const isOver = available && phase.bytes > available;
  const filled = make(isOver ? "div.plan-filled.over" : "div.plan-filled");
  filled.style.setProperty("--share", phase.bytes / most);
  const limit = available ? make("div.plan-limit") : null;
  limit?.style.setProperty("--share", available / most);
  return make("div.plan-row", {}, make("span.plan-name", {}, phase.name),
    make("div.plan-bar", {"aria-hidden": "true"}, filled, limit),
    make("span.plan-size", {}, `${bytes(phase.bytes)}${isOver ? " (too much)" : ""}`));
}

function notice(title, lines) {
  return make("div.notice", {}, make("p", {}, title), make("ul", {}, ...lines.map((line) => make("li", {}, line))));
}

function changeList(changes, apply) {
  const one = ({option, value, why}) => make("li", {}, make("code", {}, `${option} ${written(value)}`),
    why ? `: ${why} ` : " ", inline("Use this", () => apply(option, value)));
  const takeAll = () => changes.forEach(({option, value}) => apply(option, value));
  return make("div.notice", {}, make("p", {}, changes.length > 1 ? "With all of these it fits:" : "With this it fits:"),
    make("ul", {}, ...changes.map(one)), changes.length > 1 ? button("Use all of them", takeAll) : null);
}
