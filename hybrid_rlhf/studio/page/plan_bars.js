// What a run needs: memory by phase beside what there is, seconds of a step, the verdict and its advice.

import {make, table} from "./dom.js";
import {duration, size} from "./amounts.js";

// apply(option, text): take a piece of advice that names an option.
export function planBars({fits, available, phases, lines, times, verdict, advice}, apply) {
  const most = Math.max(available ?? 0, ...phases.map((phase) => phase.bytes), 1);
  const parts = [make(`p.verdict.${fits ? "good" : "fault"}`, {}, fits ? "✓ " : "✗ ", verdict)];
  if (advice?.length) parts.push(adviceList(advice, apply));
  if (phases.length) {
    parts.push(make("div.bars", {}, ...phases.map((phase) => bar(phase, most, available))),
      make("p.help", {}, available ? `The line marks what there is: ${size(available)}.` : "How much memory there is, is not known."));
  }
  if (times?.length) parts.push(timeTable(times));
  if (lines?.length) {
    parts.push(make("details", {}, make("summary", {}, "What takes the memory"), table([{title: "What", cell: (line) => line.name},
      {title: "Memory", isNumber: true, cell: (line) => size(line.bytes)}], lines, "What takes the memory")));
  }
  return parts;
}

function bar({name, bytes}, most, available) {
  const isOver = available && bytes > available;
  const filled = make(`div.filled${isOver ? ".over" : ""}`);
  filled.style.setProperty("--share", bytes / most);
  const limit = available ? make("div.limit") : null;
  limit?.style.setProperty("--share", available / most);
  return make("div.bar-row", {}, make("span.bar-name", {}, name), make("div.bar", {"aria-hidden": "true"}, filled, limit),
    make("span.bar-size", {}, `${size(bytes)}${isOver ? " (too much)" : ""}`));
}

function timeTable(times) {
  return table([{title: "A step", cell: (row) => row.name}, {title: "Time", isNumber: true, cell: (row) => duration(row.seconds)}], times,
    "Predicted time of a step");
}

function adviceList(advice, apply) {
  return make("div.notice", {}, make("p", {}, "What would help:"), make("ul", {}, ...advice.map((text) => {
    const named = /^-{0,2}([a-z_]+(?:\.[a-z_0-9]+)+)[=: ]+(\S.*)$/.exec(text);
    const take = named && make("button.quiet-button", {type: "button", onclick: () => apply(named[1], named[2])}, "Use this");
    return make("li", {}, named ? make("code", {}, text) : text, take ? " " : null, take);
  })));
}
