// How a run was made and what it took: time and memory by phase, settings, the command, checkpoints, versions, and the
// card of its model.

import {make, table} from "./dom.js";
import {bytes, duration} from "./format.js";
import {markdown} from "./markdown.js";

// makeDetails() -> {node, update(found)}. A part is made again only where what it shows has changed, and stays open.
export function makeDetails() {
  const parts = [
    part(({evaluation}) => evaluation, (text) => text ? markdown(text, "Evaluation") : []),
    part(({phases, memory}) => [phases, memory], costs),
    part(({header}) => header, (header) => header.length ? [make("h2", {}, "What it began with"),
      make("ul.plain", {}, ...header.map((line) => make("li", {}, line)))] : []),
    part(({command}) => command, (command) => command ? [make("h2", {}, "The command that does the same"),
      commandNode(command)] : []),
    part(({checkpoints}) => checkpoints, (all) => all.length ? [folded("Checkpoints", checkpointTable(all))] : []),
    part(({settings}) => settings, (text) => text ? [folded("Settings", textNode(text, "Settings"))] : []),
    part(({versions}) => Object.entries(versions).sort(),
      (all) => all.length ? [folded("Versions", versionTable(all))] : []),
    part(({card}) => card, (text) => text ? [folded("Model card", textNode(text, "Model card"))] : [])
  ];
  const update = (found) => parts.forEach((each) => each.update(found));
  return {node: make("div", {}, ...parts.map((each) => each.node)), update};
}

function part(read, fill) {
  const node = make("section");
  let before = "";
  return {node, update(found) {
    const value = read(found), now = JSON.stringify(value);
    if (now === before) return;
    before = now;
    const isOpen = node.querySelector("details")?.open;
    node.replaceChildren(...fill(value));
    node.hidden = !node.children.length;
    if (isOpen) node.querySelector("details").open = true;
  }};
}

function costs([phases, memory]) {
  const charted = (title, rows, key, text, caption) => {
    const some = rows.filter((row) => row[key] > 0);
    return some.length ? [make("h2", {}, title), bars(some, key, text, caption)] : [];
  };
  return [...charted("Where the time went", phases, "seconds", duration, "Seconds by phase"),
    ...charted("Most memory, by part and phase", memory, "bytes", bytes, "Memory by part and phase")];
}

// Rows with a bar each; the number is beside it as text.
function bars(rows, key, text, caption) {
  const most = Math.max(...rows.map((row) => row[key]));
  const sorted = [...rows].sort((a, b) => b[key] - a[key]);
  return make("table.bars", {}, make("caption.hidden", {}, caption), make("tbody", {}, ...sorted.map((row) => {
    const bar = make("div.bar");
    bar.style.setProperty("--share", row[key] / most);
    return make("tr", {}, make("th", {scope: "row"}, row.name), make("td.number", {}, text(row[key])),
      make("td.drawn", {}, bar));
  })));
}

const folded = (title, ...inside) => make("details", {}, make("summary", {}, title), ...inside);
const textNode = (text, title) => make("pre", {tabindex: "0", role: "region", "aria-label": title}, text);

function commandNode(command) {
  const told = make("span.quiet", {role: "status"});
  const copy = make("button", {type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(command);
      told.textContent = "Copied.";
    } catch {
      told.textContent = "The browser does not let the page copy; select the text.";
    }
  }}, "Copy");
  return make("div", {}, make("pre.command", {tabindex: "0", role: "region", "aria-label": "Command"}, command),
    make("div.line", {}, copy, told));
}

function checkpointTable(checkpoints) {
  return table([
    {title: "Name", cell: (row) => row.name}, {title: "Step", cell: (row) => String(row.step ?? ""), isNumber: true},
    {title: "On disk", cell: (row) => bytes(row.bytes), isNumber: true},
    {title: "Note", cell: (row) => row.is_best ? "best so far" : ""}
  ], checkpoints, "Checkpoints");
}

function versionTable(versions) {
  return table([{title: "Package", cell: ([name]) => name}, {title: "Version", cell: ([, text]) => String(text)}],
    versions, "Versions");
}
