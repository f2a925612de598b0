// Rows as the model will see them. What is trained stands in brackets, bold and underlined: not told by colour alone.

import {make, table} from "./dom.js";

const COLUMNS = [{title: "Rows", cell: (row) => row.name},
  {title: "Count", isNumber: true, cell: (row) => number(row.rows)}];

export function previewRows({counts, dropped, examples}) {
  const told = counts.filter((row, i) => row.rows || !i);
  const isTrained = examples.some((each) => each.parts.some((part) => part.is_trained));
  return [table(COLUMNS, told, "Counts of rows"), lostRows(dropped.filter((each) => each.rows)),
    examples.length ? legend(isTrained) : "", ...examples.map(example)];
}

function lostRows(lost) {
  if (!lost.length) return make("p.help", {}, "No row is lost.");
  const items = lost.map(({why, rows}) => make("li", {}, `${number(rows)}: ${why}`));
  return make("div.notice", {}, make("p", {}, "Rows that will be lost:"), make("ul", {}, ...items));
}

function legend(isTrained) {
  if (isTrained) {
    return make("p.help", {}, "The model learns to write what stands in ", make("strong.trained", {}, "brackets"),
      "; the rest it only reads.");
  }
  return make("p.help", {},
    "These are prompts: the model only reads them, and learns from the answers that it writes itself.");
}

function example({title, parts}, i) {
  const texts = parts.map((part) => make(part.is_trained ? "strong.trained" : "span", {}, part.text));
  return make("figure.example", {}, make("figcaption", {}, title || `Example ${i + 1}`),
    make("div.said", {}, ...texts));
}

const number = (count) => count.toLocaleString("en");
