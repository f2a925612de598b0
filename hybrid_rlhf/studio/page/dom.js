// Nodes: build them, and change them in place. All text is set as text, never as HTML: what data or a model writes
// cannot become part of the page.

export const at = (id) => document.getElementById(id);

// make("td.number", {title: "..."}, "text", node, ...): an element; a property that begins with on is a listener.
export function make(what, properties = {}, ...inside) {
  const [tag, ...classes] = what.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else putAttribute(node, name, value === true ? "" : value);
  }
  node.append(...inside.filter((part) => part !== null && part !== undefined));
  return node;
}

export function button(text, onclick, properties = {}) {
  return make("button", {type: "button", onclick, ...properties}, text);
}

// A select; choices: [[value, text]].
export function select(properties, choices, value) {
  const node = make("select", properties, ...choices.map(([id, text]) => make("option", {value: id}, text)));
  if (value !== undefined) node.value = value;
  return node;
}

// A list of these, each a text or a list of texts and nodes.
export const list = (items, what = "ul") => make(what, {}, ...items.map((item) => make("li", {}, ...[item].flat())));

export const fold = (title, ...inside) => make("details", {}, make("summary", {}, title), ...inside);

// Preformatted text that scrolls, reached by keyboard; name: for screen readers.
export function textBlock(text, name, what = "pre") {
  return make(what, {tabindex: "0", role: "region", "aria-label": name}, text);
}

// A table: columns [{title, cell(row) -> text or node, isNumber, isHead, kind: classes of its cells}], rows; its own
// scroller where it is wide.
export function table(columns, rows, caption, what = "table") {
  const cellOf = ({isHead, isNumber, kind = "", cell}, row) =>
    make((isHead ? "th" : "td") + (isNumber ? ".number" : kind), {scope: isHead && "row"}, cell(row));
  const head = columns.map((column) => make(column.isNumber ? "th.number" : "th", {scope: "col"}, column.title));
  const body = rows.map((row) => make("tr", {}, ...columns.map((column) => cellOf(column, row))));
  return make("div.scroller", {tabindex: "0", role: "region", "aria-label": caption}, make(what, {},
    make("caption.hidden", {}, caption), make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)));
}

// A table of rows {name, value, text} with a bar each; a line marks `limit`, and a bar beyond it has another colour.
export function bars(rows, caption, limit = 0) {
  const most = Math.max(limit, ...rows.map(({value}) => value));
  const share = (what, value) => {
    const node = make(what);
    node.style.setProperty("--share", value / most);
    return node;
  };
  return make("table.bars", {}, make("caption.hidden", {}, caption), make("tbody", {}, ...rows.map(
    ({name, value, text}) => make("tr", {}, make("th", {scope: "row"}, name), make("td.number", {}, text),
      make("td.drawn", {}, share(limit && value > limit ? "div.bar.over" : "div.bar", value),
        limit ? share("div.limit", limit) : null)))));
}

// Show a line at the head of the page, which screen readers read aloud.
export function tell(text, isFault = false) {
  at("status").textContent = text;
  at("status").classList.toggle("fault", isFault);
}

export const tellFault = (fault) => tell(fault.message, true);

// A button that copies a node's text; say(text): how it went.
export function copyButton(node, say, text = "Copy", properties = {}) {
  return button(text, async () => {
    try {
      await navigator.clipboard.writeText(node.textContent);
      say("Copied.");
    } catch {
      getSelection().selectAllChildren(node); // at an http address that is not this machine's there is no clipboard
      say(document.execCommand("copy") ? "Copied." : "The text is selected; copy it from the browser's menu.");
    }
  }, properties);
}

// ---- changes in place: focus, selection, scroll and open details stay where they are

export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function putAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

// Show a state: its name as a class, which gives it a colour.
export function putState(node, name, text = name) {
  put(node, text);
  putAttribute(node, "class", `state ${name}`);
}

// Make `nodes` the children of `parent`, in this order; a node in its right place is not touched.
export function arrange(parent, nodes) {
  const focused = document.activeElement;
  const kept = new Set(nodes);
  for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
  let next = parent.firstElementChild;
  for (const node of nodes) {
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus({preventScroll: true});
}

// One view for each row, made once: list(rows, key) -> views in the rows' order; makeOne(row) -> {node, update(row)}.
export function keyed(makeOne) {
  const views = new Map();
  return (rows, key) => {
    const keys = new Set(rows.map(key));
    for (const [name, view] of views) {
      if (keys.has(name)) continue;
      view.end?.();
      views.delete(name);
    }
    return rows.map((row) => {
      const name = key(row);
      if (!views.has(name)) views.set(name, makeOne(row));
      views.get(name).update(row);
      return views.get(name);
    });
  };
}

// update(value): returns show(value) where the value differs from the last one.
export function onChange(show) {
  let last;
  return (value) => {
    const text = JSON.stringify(value);
    if (text === last) return undefined;
    last = text;
    return show(value);
  };
}

// A function that calls all of these.
export const all = (...calls) => () => calls.forEach((call) => call());
