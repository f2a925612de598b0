// What a run needs: memory by phase beside what there is, seconds of a step, the verdict and its advice.

import {make, table} from "./dom.js";
import {duration, size} from "./amounts.js";
import {written} from "./option_fields.js";

// apply(option, value): take a piece of advice.
export function planBars({fits, available, phases, lines, times, verdict, advice, changes, time_note: note, plan_notes: notes}, apply) {
  const most = Math.max(available ?? 0, ...phases.map((phase) => phase.bytes), 1);
  const parts = [make(`p.verdict.${fits ? "good" : "fault"}`, {}, fits ? "✓ " : "✗ ", verdict)];
  if (changes?.length) parts.push(changeList(changes, apply));
  else if (advice?.length) parts.push(notice("What would help:", advice));
  if (notes?.length) parts.push(notice("To know:", notes));
  if (phases.length) {
    parts.push(make("div.plan-bars", {}, ...phases.map((phase) => bar(phase, most, available))),
      make("p.help", {}, available ? `The line marks what there is: ${size(available)}.` : "How much memory there is, is not known."));
  }
  if (times?.length) parts.push(timeTable(times));
  if (note) parts.push(make("p.help", {}, `Time is ${note.replace(/^time is /, "")}.`));
  if (lines?.length) {
    parts.push(make("details", {}, make("summary", {}, "What takes the memory"), table([{title: "What", cell: (line) => line.name},
      {title: "Memory", isNumber: true, cell: (line) => size(line.bytes)}], lines, "What takes the memory")));
  }
  return parts;
}

function bar({name, bytes}, most, available) {
  const isOver = available && bytes > available;
  const filled = make(`div.plan-filled${isOver ? ".over" : ""}`);
  filled.style.setProperty("--share", bytes / most);
  const limit = available ? make("div.plan-limit") : null;
  limit?.style.setProperty("--share", available / most);
  return make("div.plan-row", {}, make("span.plan-name", {}, name), make("div.plan-bar", {"aria-hidden": "true"}, filled, limit),
    make("span.plan-size", {}, `${size(bytes)}${isOver ? " (too much)" : ""}`));
}

function timeTable(times) {
  return table([{title: "A step", cell: (row) => row.name}, {title: "Time", isNumber: true, cell: (row) => duration(row.seconds)}], times,
    "Predicted time of a step");
}

const notice = (title, lines) => make("div.notice", {}, make("p", {}, title), make("ul", {}, ...lines.map((line) => make("li", {}, line))));

function changeList(changes, apply) {
  const one = ({option, value, why}) => make("li", {}, make("code", {}, `${option} ${written(value)}`), why ? `: ${why} ` : " ",
    make("button.quiet-button", {type: "button", onclick: () => apply(option, value)}, "Use this"));
  const all = changes.length > 1 && make("button", {type: "button", onclick: () => changes.forEach((each) => apply(each.option, each.value))},
    "Use all of them");
  return make("div.notice", {}, make("p", {}, changes.length > 1 ? "With all of these it fits:" : "With this it fits:"),
    make("ul", {}, ...changes.map(one)), all || null);
}
