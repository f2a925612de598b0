// Beside the steps: what comes next, the name of the run, its start, and the same as YAML and as a command.

import {make, tell} from "./dom.js";
import {button, fieldOf, frame, goTo, inline, textInput} from "./field_frame.js";
import {address} from "./format.js";
import {nameFault, nextOf, suggestedName} from "./next_thing.js";
import {get, on, post} from "./server.js";

// leaving: functions to call when the page is left.
export function runPanel(draft, leaving) {
  const start = button("Start training", () => begin(draft, start), {id: "start", class: "primary"});
  const waits = make("p.help");
  const fault = make("p.fault", {id: "settings-fault", tabindex: "-1", hidden: true});
  draft.tellGeneral = (text) => {
    fault.textContent = text;
    fault.hidden = !text;
    if (text) fault.focus();
    return true;
  };
  const body = make("div", {hidden: true}, nameField(draft), fault, make("div.buttons", {}, start), waits,
    texts(draft));
  draft.on("answer", () => showRefusal(draft, fault));
  followJobs(draft, start, waits, leaving);
  return make("aside.run-panel", {"aria-label": "This run"}, make("h2", {}, "Your run"), nextLine(draft, body), body);
}

function nextLine(draft, body) {
  const line = make("p.next-line", {role: "status"});
  const show = () => {
    const {text, go} = nextOf(draft);
    body.hidden = !draft.options.length;
    if (line.dataset.text === text) return; // it is read aloud when it changes
    line.dataset.text = text;
    line.replaceChildren(text, ...(go ? [" ", inline("Go there", () => nextOf(draft).go?.())] : []));
  };
  for (const event of ["state", "loading", "trouble", "stage", "answer", "look", "jobs"]) draft.on(event, show);
  show();
  return line;
}

function nameField(draft) {
  const take = (run) => {
    draft.update({run, isNamed: Boolean(run.trim())});
    field.say(run.trim() ? nameFault(draft) : null);
  };
  const input = textInput({value: draft.state.run, id: "run-name", set: take});
  const field = frame(draft, "run", "Name of the run", input, {help: "Its folder below the studio's outputs."});
  const suggest = () => {
    if (draft.state.isNamed || document.activeElement === input) return;
    const run = suggestedName(draft);
    if (run === draft.state.run) return;
    input.value = run;
    draft.update({run});
  };
  for (const event of ["stage", "look", "state", "jobs"]) draft.on(event, suggest);
  return field.node;
}

// What the studio has against the settings, beside its option; nothing where the form is still being filled.
function showRefusal(draft, general) {
  draft.refused?.say(draft.unread.get(draft.refused.option) ?? null);
  draft.refused = null;
  general.hidden = true;
  const {error} = draft.answer;
  if (!error || (nextOf(draft).isMissing && !draft.isOwn(error.option))) return;
  draft.refused = fieldOf(draft, error.option, error.text);
  if (draft.refused) draft.refused.say(draft.unread.get(draft.refused.option) ?? error.text);
  else Object.assign(general, {hidden: false, textContent: error.text});
}

// Whether something stands in the way of going on; if so it is shown, and the focus goes there.
export function refuse(draft, isStart) {
  const next = nextOf(draft, isStart);
  if (!next.go) return false;
  tell(next.text, true);
  next.go();
  return true;
}

async function begin(draft, start) {
  if (start.getAttribute("aria-disabled")) return;
  start.setAttribute("aria-disabled", "true");
  tell("Looking at the settings once more …");
  try {
    await draft.settled();
    if (refuse(draft, true)) return;
    const run = draft.state.run.trim();
    await post("jobs", {kind: "train", stage: draft.state.stage, settings: draft.given(), run});
    draft.update({run: "", isNamed: false, signal: null});
    location.hash = `#/run/${address(run)}`;
  } catch (fault) {
    tell(fault.message, true);
    const option = fault.option ?? (fault.status === 409 ? "run" : null);
    if (!goTo(draft, option, fault.message)) draft.tellGeneral(fault.message);
  } finally {
    start.removeAttribute("aria-disabled");
  }
}

// What runs already, which makes it a queue; and the runs whose names are taken.
function followJobs(draft, start, waits, leaving) {
  const look = async () => {
    draft.jobs = (await get("jobs").catch(() => ({jobs: []}))).jobs;
    const busy = draft.jobs.filter((job) => ["queued", "running"].includes(job.state));
    start.textContent = busy.length ? "Add to the queue" : "Start training";
    waits.textContent = busy.length ? waitText(busy) : "";
    draft.emit("jobs");
  };
  const list = async () => {
    const {folder, runs} = await get("runs").catch(() => ({folder: draft.runs.folder, runs: draft.runs.rows}));
    draft.runs = {folder, rows: runs};
  };
  leaving.push(on("jobs", look), on("open", look), on("runs", list));
  look();
}

function waitText(busy) {
  const running = busy.find((job) => job.state === "running");
  const name = running?.kind === "train" ? running.run : running?.title;
  const when = busy.length > 1 ? `after the ${busy.length} that are there` : "after it";
  return `${running ? `${name} is running` : "Something waits already"}; this run starts ${when}.`;
}

function texts(draft) {
  const yaml = make("pre.same-yaml", {tabindex: "0", role: "region", "aria-label": "Settings as YAML"});
  const command = make("pre.same-command", {tabindex: "0", role: "region", "aria-label": "The equal command"});
  draft.on("answer", () => {
    yaml.textContent = draft.answer.yaml || `# ${draft.answer.error?.text ?? ""}`;
    command.textContent = draft.answer.command ?? "";
  });
  return make("div", {}, make("h3", {}, "The same as a file"),
    make("p.help", {}, "These settings run without the studio too."), yaml,
    make("div.buttons", {}, button("Copy the YAML", () => copy(yaml)),
      button("Download", () => download(draft.answer.file, yaml.textContent), {id: "download"})),
    make("h3", {}, "The same as a command"), command,
    make("div.buttons", {}, button("Copy the command", () => copy(command))));
}

async function copy(node) {
  try {
    await navigator.clipboard.writeText(node.textContent);
    tell("Copied.");
  } catch {
    getSelection().selectAllChildren(node);
    tell("The browser does not let the page copy; the text is selected: copy it by Ctrl+C.");
  }
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], {type: "application/yaml"}));
  make("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
  tell(`Saved as ${name}, where your browser keeps downloads.`);
}
