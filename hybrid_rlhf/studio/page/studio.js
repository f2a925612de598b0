// The frame: shows the page that the address names. A page is show(root, rest, query) -> leave(), or nothing.

import {at, make, tell, tellFault} from "./dom.js";

const PAGES = {
  start: ["Start", () => import("./start.js")],
  runs: ["Runs", () => import("./runs.js")],
  run: ["Run", () => import("./run.js")],
  compare: ["Compare", () => import("./compare.js")],
  new: ["New run", () => import("./new_run.js")],
  talk: ["Talk", () => import("./talk.js")],
  export: ["Export", () => import("./export.js")],
};
let leave = null;
let turn = 0;

// #/run/demo/ppo?step=3 -> page run, rest "demo/ppo", query step.
async function open() {
  const opened = ++turn;
  const [path, search = ""] = (location.hash.slice(2) || "runs").split("?");
  const [name, ...rest] = path.split("/");
  const [title, load] = PAGES[name] ?? PAGES.runs;
  const root = make("div");
  tell("");
  try {
    leave?.();
  } finally {
    leave = null;
  }
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${title} - hybrid_rlhf`;
  at("page").replaceChildren(root);
  try {
    const page = await load();
    const ends = await page.show(root, decodeURIComponent(rest.join("/")), new URLSearchParams(search));
    if (opened === turn) leave = ends ?? null;
    else ends?.();
  } catch (fault) {
    if (opened === turn) tellFault(fault);
  }
}

addEventListener("hashchange", () => {
  open();
  at("page").focus();
});
open();
