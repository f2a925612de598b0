// A report that the library writes as Markdown, as nodes: headings, tables, lists, paragraphs. Everything else stays text.

import {make, table} from "./dom.js";

export function markdown(text, caption) {
  const blocks = text.trim().split(/\n\s*\n/);
  return blocks.map((block) => node(block.split("\n"), caption));
}

function node(lines, caption) {
  const heading = /^(#+) (.*)/.exec(lines[0]);
  if (heading) return make(heading[1].length > 1 ? "h3" : "h2", {}, plain(heading[2]));
  if (lines.length > 1 && lines.every((line) => line.startsWith("|"))) return tableOf(lines, caption);
  if (lines.every((line) => line.startsWith("- "))) return make("ul", {}, ...lines.map((line) => make("li", {}, plain(line.slice(2)))));
  return make("p.said", {}, plain(lines.join("\n")));
}

// Cells are parted by | that no backslash is before.
function tableOf([head, , ...rows], caption) {
  const cells = (line) => line.split(/(?<!\\)\|/).slice(1, -1).map((cell) => plain(cell.trim()));
  const columns = cells(head).map((title, i) => ({title, cell: (row) => row[i] ?? ""}));
  return table(columns, rows.map(cells), caption);
}

const plain = (text) => text.replace(/<br>/g, "\n").replace(/\\([\\`*_{}[\]()#+.!|<>~-])/g, "$1")
  .replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&").replace(/\*\*([^*]+)\*\*/g, "$1").replace(/`([^`]+)`/g, "$1");
