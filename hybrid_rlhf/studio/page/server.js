// The server that the page came from, and nothing else: requests, uploads, news.

export async function get(path, query = {}) {
  const search = new URLSearchParams(query).toString();
  return answered(fetch(`api/${path}${search && `?${search}`}`));
}

export async function post(path, body = {}) {
  return answered(fetch(`api/${path}`, {
    method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)}));
}

// A request that is refused until a person has confirmed it, with the reason as the question.
export async function postConfirmed(path, body) {
  try {
    return await post(path, body);
  } catch (fault) {
    if (fault.option !== "is_confirmed" || !confirm(fault.message)) throw fault;
    return post(path, {...body, is_confirmed: true});
  }
}

export async function upload(file) {
  return answered(fetch(`api/upload?${new URLSearchParams({name: file.name})}`, {
    method: "POST", headers: {"Content-Type": "application/octet-stream"}, body: file}));
}

// The JSON of an answer; an Error with the server's own line where it refused (and .option, the setting it is about).
async function answered(asked) {
  const reply = await asked.catch(() => {
    throw new Error("the studio does not answer; has it been ended?");
  });
  const body = await reply.json().catch(() => ({}));
  if (reply.ok) return body;
  const refused = new Error(body.error ?? `the studio answered ${reply.status}`);
  throw Object.assign(refused, {option: body.option, status: reply.status});
}

const listeners = new Map(); // name -> functions
let news = null;

// Call handle(data) at each event `name`; returns what ends it. Names: runs, run, jobs, job, talk, and open: from now
// on news are heard (again), and what was told before may have been missed.
export function on(name, handle) {
  if (!listeners.has(name)) {
    listeners.set(name, new Set());
    if (news) hear(name);
  }
  listeners.get(name).add(handle);
  listen();
  return () => listeners.get(name).delete(handle);
}

// A hidden tab hears nothing: a browser has six connections to one server, for all tabs together, and with the seventh
// tab nothing would load any more. Shown again, it is told "open", upon which pages load what they show.
function listen() {
  if (news || document.hidden || !listeners.size) return;
  news = new EventSource("api/events");
  for (const name of listeners.keys()) hear(name);
  news.addEventListener("open", () => tellAll("open", {}));
  news.addEventListener("reload", () => tellAll("open", {}));
}

function hear(name) {
  if (name !== "open") news.addEventListener(name, (event) => tellAll(name, JSON.parse(event.data)));
}

function hush() {
  news?.close();
  news = null;
}

document.addEventListener("visibilitychange", () => document.hidden ? hush() : listen());
addEventListener("pagehide", hush); // a page that the browser keeps for its back button
addEventListener("pageshow", listen);

function tellAll(name, data) {
  for (const handle of listeners.get(name) ?? []) handle(data);
}
