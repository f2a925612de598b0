// Changes that leave alone what has not changed: focus, selection, scroll and open details stay where they are.

export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function putAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

// `nodes` become the children of `parent`, in this order; what stands right already is not touched.
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

// One thing for each row, made once: list(rows, key) -> things in the rows' order; make(row) -> {node, update(row)}.
export function keyed(makeOne) {
  const held = new Map();
  return (rows, key) => {
    const now = new Set(rows.map(key));
    for (const [name, thing] of held) {
      if (now.has(name)) continue;
      thing.end?.();
      held.delete(name);
    }
    return rows.map((row) => {
      const name = key(row);
      if (!held.has(name)) held.set(name, makeOne(row));
      held.get(name).update(row);
      return held.get(name);
    });
  };
}
