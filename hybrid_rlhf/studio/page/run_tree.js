// Runs as trees: who was made from whom. A line (sft, reward, ppo) stays a line; only where it branches it is indented.

// rows -> [{folder, lines: [{row, depth, trail, others}]}], the folder with the newest run first, and in it the newest
// tree. folder: what the ids of its trees begin with. trail: ids of those before it in its line. others: its parents
// beside the one that it stands under.
export function folders(rows) {
  const found = new Map();
  for (const {folder, lines, newest} of trees(rows)) {
    if (!found.has(folder)) found.set(folder, {folder, lines: [], newest});
    found.get(folder).lines.push(...lines);
  }
  return [...found.values()];
}

function trees(rows) {
  const byId = new Map(rows.map((row) => [row.id, row]));
  const parents = chosenParents(rows, byId), children = new Map();
  const oldestFirst = [...rows].sort((a, b) => compare(a.started, b.started) || compare(a.id, b.id));
  for (const row of oldestFirst) {
    const parent = parents.get(row.id);
    if (parent) children.set(parent, [...children.get(parent) ?? [], row]);
  }
  const found = oldestFirst.filter((row) => !parents.get(row.id)).map((root) => tree(root, children));
  return found.sort((a, b) => compare(b.newest, a.newest));
}

const compare = (a, b) => a === b ? 0 : (a ?? "") < (b ?? "") ? -1 : 1;

function tree(root, children) {
  const lines = [];
  const walk = (row, depth, trail) => {
    const from = children.get(row.id) ?? [];
    const known = new Set([...trail, ...above(lines, depth)]);
    lines.push({row, depth, trail, others: (row.parents ?? []).filter((id) => id !== row.id && !known.has(id))});
    if (from.length === 1) walk(from[0], depth, [...trail, row.id]);
    else for (const child of from) walk(child, depth + 1, []);
  };
  walk(root, 0, []);
  const newest = lines.reduce((time, {row}) => compare(row.started, time) > 0 ? row.started : time, "");
  return {folder: commonFolder(lines.map(({row}) => row.id)), lines, newest};
}

// The ids of the lines that a new one of this depth stands under.
function above(lines, depth) {
  const found = [];
  let least = depth;
  for (const {row, depth: at, trail} of [...lines].reverse()) {
    if (at >= least) continue;
    found.push(row.id, ...trail);
    least = at;
  }
  return found;
}

// id -> the parent that it stands under: of several the one with the longest line above it, so that it is one line.
function chosenParents(rows, byId) {
  const heights = new Map(), chosen = new Map();
  const height = (id, below) => {
    if (heights.has(id)) return heights.get(id);
    let best = 0, parent = null;
    for (const each of byId.get(id).parents ?? []) {
      if (each === id || !byId.has(each) || below.has(each)) continue; // runs may name each other in a circle
      const far = 1 + height(each, new Set([...below, id]));
      if (far > best) [best, parent] = [far, each];
    }
    heights.set(id, best);
    chosen.set(id, parent);
    return best;
  };
  for (const {id} of rows) height(id, new Set([id]));
  for (const {id} of rows) if (leadsBack(id, chosen)) chosen.set(id, null);
  return chosen;
}

function leadsBack(id, chosen) {
  const passed = new Set();
  for (let at = chosen.get(id); at; at = chosen.get(at)) {
    if (at === id) return true;
    if (passed.has(at)) return false;
    passed.add(at);
  }
  return false;
}

function commonFolder(ids) {
  let common = ids[0].split("/").slice(0, -1);
  for (const id of ids) {
    const parts = id.split("/").slice(0, -1);
    const end = common.findIndex((part, i) => part !== parts[i]);
    if (end >= 0) common = common.slice(0, end);
  }
  return common.join("/");
}
