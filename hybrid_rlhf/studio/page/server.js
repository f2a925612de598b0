// The server that the page came from: requests, uploads, news, and reloads at a bearable pace.

export async function get(path, query = {}) {
  const search = new URLSearchParams(query).toString();
  return answered(fetch(`api/${path}${search && `?${search}`}`));
}

export const post = (path, body = {}) => postWithToken(path, body);

// token: typed by the user, where the studio asks for it again.
export async function postWithToken(path, body, token) {
  const headers = {"Content-Type": "application/json", ...(token && {"X-Studio-Token": token})};
  return answered(fetch(`api/${path}`, {method: "POST", headers, body: JSON.stringify(body)}));
}

// Post; where the server refuses until a person confirms, ask with its reason and post again.
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

// The JSON of an answer; an Error with the server's message where it refuses (and .option, the setting it is about).
async function answered(request) {
  const reply = await request.catch(() => {
    throw new Error("the studio does not answer; has it been ended?");
  });
  const body = await reply.json().catch(() => ({}));
  if (reply.ok) return body;
  const refusal = new Error(body.error?.message ?? body.error ?? `the studio answered ${reply.status}`);
  throw Object.assign(refusal, {option: body.option, status: reply.status});
}

// ---- news

const listeners = new Map(); // name -> functions
let news = null;

// Call handle(data) at each event of these names; returns what ends it. Names: runs, run, jobs, job, talk, and open:
// the connection is there (again), and events before it may have been missed.
export function on(names, handle) {
  const all = names.split(" ");
  for (const name of all) {
    if (!listeners.has(name)) {
      listeners.set(name, new Set());
      if (news) hear(name);
    }
    listeners.get(name).add(handle);
  }
  listen();
  return () => all.forEach((name) => listeners.get(name).delete(handle));
}

// A hidden tab closes its connection: a browser has six connections to one server, for all tabs together, and a seventh
// tab would not load. Shown again, it gets "open", upon which pages load what they show.
function listen() {
  if (news || document.hidden || !listeners.size) return;
  news = new EventSource("api/events");
  for (const name of listeners.keys()) hear(name);
  news.addEventListener("open", () => publish("open", {}));
}

function hear(name) {
  if (name !== "open") news.addEventListener(name, (event) => publish(name, JSON.parse(event.data)));
}

function hush() {
  news?.close();
  news = null;
}

function publish(name, data) {
  for (const handle of listeners.get(name) ?? []) handle(data);
}

document.addEventListener("visibilitychange", () => document.hidden ? hush() : listen());
addEventListener("pagehide", hush); // the browser may keep the page for its back button
addEventListener("pageshow", listen);

// ---- pace

// Returns ask(): calls work(), at most once in `wait` ms and never twice at once. While the tab is hidden, or `node` is
// off the screen, it waits; several asks meanwhile are one call then. ask.end() ends it. A fault goes to `fail`.
export function paced(work, {wait = 500, node = null, fail = () => {}} = {}) {
  let isAsked = false, isBusy = false, isSeen = node === null, hasEnded = false;
  let last = -Infinity, timer = 0;

  async function go() {
    clearTimeout(timer);
    if (!isAsked || isBusy || !isSeen || document.hidden || hasEnded) return;
    const left = last + wait - performance.now();
    if (left > 0) {
      timer = setTimeout(go, left);
      return;
    }
    isAsked = false;
    isBusy = true;
    try {
      await work();
    } catch (fault) {
      if (!hasEnded) fail(fault);
    }
    isBusy = false;
    last = performance.now();
    go();
  }

  const endSeeing = node && watchSeen(node, (isNow) => {
    isSeen = isNow;
    go();
  });
  document.addEventListener("visibilitychange", go);
  const ask = () => {
    isAsked = true;
    go();
  };
  ask.end = () => {
    hasEnded = true;
    clearTimeout(timer);
    endSeeing?.();
    document.removeEventListener("visibilitychange", go);
  };
  return ask;
}

const watchers = new Map(); // node -> function of whether it is on the screen, or nearly
const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) watchers.get(entry.target)?.(entry.isIntersecting);
}, {rootMargin: "120px"});

// Call handle(isSeen) now and whenever `node` enters or leaves the screen; returns what ends it.
export function watchSeen(node, handle) {
  watchers.set(node, handle);
  observer.observe(node);
  return () => {
    observer.unobserve(node);
    watchers.delete(node);
  };
}
