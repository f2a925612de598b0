// Nodes. All text is set as text, never as HTML: what data or a model says cannot become part of the page.

export const at = (id) => document.getElementById(id);

// make("td.number", {title: "..."}, "text", node, ...): an element; a property that begins with on is a listener.
export function make(what, properties = {}, ...inside) {
  const [tag, ...classes] = what.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...inside.filter((each) => each !== null && each !== undefined));
  return node;
}

// A table: columns [{title, cell(row) -> text or node, isNumber}], rows; its own scroller where it is wide.
export function table(columns, rows, caption) {
  const head = make("tr", {}, ...columns.map((c) => make(c.isNumber ? "th.number" : "th", {scope: "col"}, c.title)));
  const body = rows.map((row) => make("tr", {}, ...columns.map((c) => make(c.isNumber ? "td.number" : "td", {}, c.cell(row)))));
  return make("div.scroller", {tabindex: "0", role: "region", "aria-label": caption},
    make("table", {}, make("caption.hidden", {}, caption), make("thead", {}, head), make("tbody", {}, ...body)));
}

export function tell(text, isFault = false) {
  at("status").textContent = text;
  at("status").classList.toggle("fault", isFault);
}
