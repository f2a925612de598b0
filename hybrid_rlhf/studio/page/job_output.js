// What a job has written so far: the end of it, and what comes while it is looked at.

import {make} from "./dom.js";
import {put} from "./in_place.js";
import {paced} from "./paced.js";
import {get, on} from "./server.js";

const MOST = 200000; // characters that stay on the page; what is older is cut, and that is said

// makeJobOutput(job id) -> {node, end()}: closed at first, and nothing is read before it is opened.
// hear(text): told of all that is shown, whenever it grows.
export function makeJobOutput(id, title = "Output", hear = () => {}) {
  const view = {id, hear, next: null, text: ""};
  view.pre = make("pre", {tabindex: "0", role: "region", "aria-label": title});
  view.cut = make("p.quiet", {hidden: true}, "Only the end is shown here; the job's folder has all of it.");
  view.fault = make("p.fault", {role: "status"});
  const look = () => view.node.open && view.load();
  view.node = make("details", {ontoggle: look}, make("summary", {}, title), view.cut, view.pre, view.fault);
  view.load = paced(() => load(view), {node: view.pre, fail: (fault) => put(view.fault, fault.message)});
  const endings = [on("job", (job) => job.id === id && look()), on("open", look), view.load.end];
  return {node: view.node, end: () => endings.forEach((end) => end())};
}

async function load(view) {
  const isAtEnd = view.pre.scrollTop + view.pre.clientHeight >= view.pre.scrollHeight - 8;
  const found = await get("job", {id: view.id, ...(view.next !== null && {after: view.next})});
  put(view.fault, "");
  const hasMore = found.next !== view.next && found.output !== "";
  view.next = found.next;
  if (!hasMore) {
    if (!view.text) put(view.pre, "Nothing yet.");
    return;
  }
  view.text += found.output;
  if (view.text.length > MOST) {
    view.text = view.text.slice(-MOST);
    view.cut.hidden = false;
  }
  put(view.pre, view.text);
  view.hear(view.text);
  if (isAtEnd) view.pre.scrollTop = view.pre.scrollHeight;
  view.load(); // 64 KiB at most come at once
}
