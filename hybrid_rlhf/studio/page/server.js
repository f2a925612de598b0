// The server that the page came from, and nothing else: requests, uploads, news.

export async function get(path, query = {}) {
  const search = new URLSearchParams(query).toString();
  return answered(await fetch(`api/${path}${search && `?${search}`}`));
}

export async function post(path, body = {}) {
  return answered(await fetch(`api/${path}`, {
    method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)}));
}

export async function upload(file) {
  return answered(await fetch(`api/upload?${new URLSearchParams({name: file.name})}`, {
    method: "POST", headers: {"Content-Type": "application/octet-stream"}, body: file}));
}

// The JSON of an answer; an Error with the server's own line where it refused (and .option, the setting it is about).
async function answered(reply) {
  const body = await reply.json().catch(() => ({}));
  if (reply.ok) return body;
  throw Object.assign(new Error(body.error ?? `the studio answered ${reply.status}`), {option: body.option, status: reply.status});
}

const listeners = new Map(); // name -> functions
let news = null;

// Call handle(data) at each event `name`; returns what ends it. Names: runs, run, jobs, job, talk, open (the connection stands again).
export function on(name, handle) {
  news ??= listen();
  if (!listeners.has(name)) {
    listeners.set(name, new Set());
    if (name !== "open") news.addEventListener(name, (event) => tellAll(name, JSON.parse(event.data)));
  }
  listeners.get(name).add(handle);
  return () => listeners.get(name).delete(handle);
}

function listen() {
  const source = new EventSource("api/events");
  let wasLost = false;
  source.addEventListener("open", () => {
    if (wasLost) tellAll("open", {});
    wasLost = false;
  });
  source.addEventListener("error", () => (wasLost = true));
  source.addEventListener("reload", () => tellAll("open", {}));
  return source;
}

function tellAll(name, data) {
  for (const handle of listeners.get(name) ?? []) handle(data);
}
