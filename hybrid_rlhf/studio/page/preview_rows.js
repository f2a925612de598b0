// Rows as the model will see them. What is trained stands in brackets, is bold and underlined: not told by colour alone.

import {make, table} from "./dom.js";

export function previewRows({counts, dropped, examples}) {
  const parts = [];
  const lost = (dropped ?? []).filter((each) => each.rows);
  const told = (counts ?? []).filter((row, i) => row.rows || !i);
  if (told.length) parts.push(table([{title: "Rows", cell: (row) => row.name}, {title: "Count", isNumber: true, cell: (row) => number(row.rows)}], told, "Counts of rows"));
  parts.push(lost.length ? make("div.notice", {}, make("p", {}, "Rows that will be lost:"),
    make("ul", {}, ...lost.map(({why, rows}) => make("li", {}, `${number(rows)}: ${why}`)))) : make("p.help", {}, "No row is lost."));
  if (examples.some((each) => each.parts.some((part) => part.is_trained))) {
    parts.push(make("p.help", {}, "The model learns to write what stands in ", make("strong.trained", {}, "brackets"), "; the rest it only reads."));
  } else if (examples.length) {
    parts.push(make("p.help", {}, "These are prompts: the model only reads them, and learns from the answers that it writes itself."));
  }
  return [...parts, ...examples.map(example)];
}

function example({title, parts}, i) {
  return make("figure.example", {}, make("figcaption", {}, title || `Example ${i + 1}`),
    make("div.said", {}, ...parts.map((part) => (part.is_trained ? make("strong.trained", {}, part.text) : make("span", {}, part.text)))));
}

const number = (count) => (typeof count === "number" ? count.toLocaleString("en") : String(count ?? ""));
